// Groups of equal count by rank: sort the keys once, then find each element's group again, the lower index first
// among equals.
#pragma once

#include "laconic/kernels/native/frame.h"

namespace laconic::LACONIC_TARGET {

// Keys are unsigned and below 2^32 - 1; ranks count from the smallest.
class Ranks {
 public:
  // The keys of n elements, and no groups yet.
  template <class Key>
  void take(std::int64_t n, Key key) {
    sorted_.resize(n);
    for (std::int64_t i = 0; i < n; ++i) sorted_[i] = key(i);
    sort();
    groups_.clear();
  }

  // The next `groups` groups share ranks [begin, begin + n): group g of them starts at ceil(g n / groups).
  void split(std::int64_t begin, std::int64_t n, std::int64_t groups) {
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t start = begin + (g * n + groups - 1) / groups;
      const std::uint32_t key = sorted_[start];
      const bool tied = !groups_.empty() && groups_.back().key == key;
      std::int64_t next = start;
      if (tied) next = groups_.back().next;
      while (!tied && next > 0 && sorted_[next - 1] == key) --next;
      groups_.push_back({start, next, key, 0});
    }
  }

  // The mean of each group, in double; also makes ready for `group_of`.
  template <class Value>
  void means(float* book, Value value) {
    const auto count = static_cast<std::int64_t>(groups_.size());
    const auto n = static_cast<std::int64_t>(sorted_.size());
    std::int64_t at = 0;
    for (std::int64_t g = 0; g < count; ++g) {
      const std::int64_t end = g + 1 < count ? groups_[g + 1].start : n;
      double sum = 0;
      for (std::int64_t r = groups_[g].start; r < end; ++r) sum += static_cast<double>(value(sorted_[r]));
      book[g] = static_cast<float>(sum / static_cast<double>(end - groups_[g].start));
      while (at + 1 < count && groups_[at + 1].start <= groups_[g].next) ++at;
      groups_[g].group = static_cast<std::uint32_t>(at);
    }
    firsts_.assign(std::bit_ceil(static_cast<std::size_t>(count)), ~std::uint32_t{0});
    for (std::int64_t g = 0; g < count; ++g) firsts_[g] = groups_[g].key;
  }

  // The group of the next element with this key; call it once an element, in order.
  std::uint32_t group_of(std::uint32_t key) {
    std::size_t found = 0;
    for (std::size_t step = firsts_.size() >> 1; step; step >>= 1)
      found += firsts_[found + step] <= key ? step : 0;
    Group& group = groups_[found];
    if (group.key != key) return static_cast<std::uint32_t>(found);
    // It may be one of several equal keys that two groups share.
    const std::int64_t rank = group.next++;
    while (group.group < found && groups_[group.group + 1].start <= rank) ++group.group;
    return group.group;
  }

 private:
  struct Group {
    std::int64_t start;   // its first rank
    std::int64_t next;    // rank of the next element whose key is `key`
    std::uint32_t key;    // its smallest
    std::uint32_t group;  // where `next` lies
  };

  void sort() {
    const std::size_t n = sorted_.size();
    if (n < 2048) {
      std::sort(sorted_.begin(), sorted_.end(), [](std::uint32_t a, std::uint32_t b) { return a < b; });
      return;
    }
    spare_.resize(n);
    for (const int shift : {0, 11, 22}) {
      std::vector<std::int64_t> places(std::size_t{1} << 11, 0);
      for (const std::uint32_t key : sorted_) ++places[key >> shift & 2047];
      std::int64_t sum = 0;
      for (std::int64_t& place : places) {
        const std::int64_t count = place;
        place = sum;
        sum += count;
      }
      for (const std::uint32_t key : sorted_) spare_[places[key >> shift & 2047]++] = key;
      sorted_.swap(spare_);
    }
  }

  std::vector<std::uint32_t> sorted_, spare_, firsts_;
  std::vector<Group> groups_;
};

}  // namespace laconic::LACONIC_TARGET
