"""Some thirty mutants as data: faults of the kinds that reviews of this code have found.

Each visibly changes behaviour. Few make a test of the module fail at once: most break a bound, a tie, a
second call, a key or one rank of several.
"""

from __future__ import annotations

from dataclasses import dataclass

NATIVE = (".cc", ".h")


@dataclass(frozen=True)
class Mutant:
    """One fault: `old`, which occurs once in `file`, becomes `new`.

    `hints`: files of tests that come first, as globs, before those that name the module.
    """

    name: str
    file: str  # below src/laconic
    old: str
    new: str
    fault: str
    hints: tuple[str, ...] = ()

    @property
    def native(self) -> bool:
        """Whether the native module has to be built again."""
        return self.file.endswith(NATIVE)


MUTANTS = (
    Mutant(
        "core-common-key",
        "core/turn.py",
        "return mix(self.seed, self.step, name_key(name), COMMON)",
        "return mix(self.seed, name_key(name), COMMON)",
        "keys that all ranks share are the same at every step",
        ("tests/unit/test_layout*", "tests/unit/test_reducers*", "tests/laws/test_selectors*"),
    ),
    Mutant(
        "reference-ties",
        "kernels/select/reference.py",
        "np.flatnonzero(part == least[i])[room:]",
        "np.flatnonzero(part == least[i])[:-room]",
        "the reference selection takes the last of equal magnitudes",
        ("tests/native/test_select*",),
    ),
    Mutant(
        "native-rice-bound",
        "kernels/entropy/cpu.cc",
        "if (high > most || (high << r) + sum > static_cast<std::uint64_t>(n))",
        "if (high > most || (high << r) + sum > static_cast<std::uint64_t>(n) + 1)",
        "the Golomb-Rice decoder accepts a position one past its tensor",
        ("tests/native/test_codes*", "tests/native/test_entropy*", "tests/laws/test_indices*"),
    ),
    Mutant(
        "native-sampled-rounds",
        "kernels/select/cpu.cc",
        "for (std::int64_t left = rounds; left >= 0; --left) {",
        "for (std::int64_t left = rounds; left > 0; --left) {",
        "the sampled selection lowers its threshold once too few",
        ("tests/native/test_select*", "tests/laws/test_selectors*"),
    ),
    Mutant(
        "native-tied-dither",
        "kernels/quantise/round.h",
        "dither.lower(static_cast<std::uint64_t>(first + i))",
        "dither.lower(static_cast<std::uint64_t>(i))",
        "ties of stochastic rounding draw the bits of the first chunk",
        ("tests/native/test_quantise*",),
    ),
    Mutant(
        "native-ternary-end",
        "kernels/bitpack/ternary.h",
        "constexpr int ends[] = {bytes, 3, 9, 27, 81};",
        "constexpr int ends[] = {bytes, 3, 9, 27, 82};",
        "a byte of four ternary levels may hold a fifth",
        ("tests/native/test_bitpack*",),
    ),
    Mutant(
        "native-width-ties",
        "kernels/gap_widths/cpu.cc",
        "if (total >= least) continue;",
        "if (total > least) continue;",
        "of widths with equally many bits the encoder takes the most",
        ("tests/native/test_codes*", "tests/native/test_gap_widths*", "tests/laws/test_indices*"),
    ),
    Mutant(
        "codecs-value-keys",
        "codecs/sparse/__init__.py",
        "self.values.encode_segments(chosen, units, [key ^ VALUES for key in drawn])",
        "self.values.encode_segments(chosen, units, [key ^ VALUES for key in keys])",
        "all ranks round the values of random-k by the same random bits",
        ("tests/unit/test_reducers*", "tests/unit/test_sparse_messages*", "tests/laws/test_variance*"),
    ),
    Mutant(
        "feedback-put-back",
        "feedback/memory/residual.py",
        "    def put_back(self, layout: Layout) -> None:\n        self._pending.drop(layout)",
        "    def put_back(self, layout: Layout) -> None:\n        assert layout is not None",
        "what a skipped step has sent is not put back",
        ("tests/laws/test_feedback*", "tests/unit/test_exchange*"),
    ),
    Mutant(
        "feedback-discard",
        "feedback/memory/residual.py",
        "            self._velocity.discard()",
        "            pass",
        "the velocity survives `discard`",
        ("tests/laws/test_feedback*", "tests/laws/test_methods*", "tests/dist/test_ddp_lifetime*"),
    ),
    Mutant(
        "comm-void-infinite",
        "comm/skippable.py",
        "if int(largest.max()) < EXPONENT else None",
        "if int(largest.max()) <= EXPONENT else None",
        "an infinite norm, which says that a rank skips, passes for a norm",
        ("tests/unit/test_shared_scale*", "tests/laws/test_reducers*"),
    ),
    Mutant(
        "reducers-rank-order",
        "reducers/gather.py",
        "ordered = [*enumerate(messages)]",
        "ordered = [*enumerate(messages)][::-1]",
        "messages are added from the last rank to the first",
        ("tests/unit/test_reducers*", "tests/unit/test_gathers*", "tests/laws/test_reducers*"),
    ),
    Mutant(
        "reducers-second-keys",
        "reducers/scatter_reduce/two_halves.py",
        "wire = encoded(mean, home, codec, Turn(turn.step, turn.rank, mix(turn.seed, ANSWER)))",
        "wire = encoded(mean, home, codec, turn)",
        "both roundings of a scatter-reduce draw the same bits",
        ("tests/unit/test_reducers*", "tests/unit/test_scatter_reduce*", "tests/laws/test_variance*"),
    ),
    Mutant(
        "exchange-put-back",
        "exchange/attached.py",
        "            route.put_back(part)",
        "            assert route",
        "a skipped step leaves its changes in every memory",
        ("tests/laws/test_skipped_steps*", "tests/unit/test_exchange*"),
    ),
    Mutant(
        "exchange-revoked",
        "integrations/transactional.py",
        "if self._exchange is not None and step == self._began + 1:",
        "if self._exchange is not None and step >= self._began:",
        "a step that is thrown away leaves its memory behind",
        ("tests/unit/test_transactional*",),
    ),
    Mutant(
        "optim-own-steps",
        "optim/lamb.py",
        'torch._foreach_div_(steps, [1 - b1 ** state["step"] for state in states])',
        'torch._foreach_div_(steps, [1 - b1 ** states[0]["step"] for _ in states])',
        "the bias correction of a tensor counts the steps of another",
        ("tests/unit/test_layerwise*",),
    ),
    Mutant(
        "lowbit-layer-keys",
        "lowbit/grid.py",
        "return replace(self, seed=mix(self.seed, name_key(name)))",
        "return replace(self, seed=mix(self.seed, name_key(name) * 0))",
        "all layers round by the same random bits",
        ("tests/unit/test_lowbit*",),
    ),
    Mutant(
        "ddp-given-twice",
        "ddp/unused_parameters.py",
        "if name not in self._watched or name in self._made or name in self._given:",
        "if name not in self._watched or name in self._made:",
        "the second backward pass of a step forgets the mean given to an unused parameter",
        ("tests/dist/test_ddp_unused*",),
    ),
    Mutant(
        "fsdp-decay",
        "fsdp/memory.py",
        "STORE.decode_add_(wire, x, alpha=self.decay)",
        "STORE.decode_add_(wire, x)",
        "residuals of shards do not decay",
        ("tests/unit/test_shards*", "tests/dist/test_fsdp*"),
    ),
    Mutant(
        "sparsity-regrown",
        "sparsity/drop_and_grow.py",
        "largest(score.masked_fill(kept, float(score.amin()) - 1), count, key + 1)",
        "largest(score.masked_fill(kept, float(score.amin())), count, key + 1)",
        "an entry in use may grow again, and the mask shrinks, where scores are equal",
        ("tests/unit/test_rigl*",),
    ),
    Mutant(
        "activations-stale",
        "activations/saved.py",
        "int(saved.untyped_storage()._cdata), int(saved._version), int(saved.storage_offset())",
        "int(saved.untyped_storage()._cdata), 0, int(saved.storage_offset())",
        "a tensor that was changed in place is taken for its old self",
        ("tests/unit/test_activations_sharing*", "tests/unit/test_activations*"),
    ),
    Mutant(
        "admm-dual-sign",
        "admm/worker.py",
        "old_u + self.problem.training.dual * (old_x - f)",
        "old_u - self.problem.training.dual * (old_x - f)",
        "duals step in the wrong direction",
        ("tests/unit/test_block_admm.py", "tests/unit/test_admm*"),
    ),
    Mutant(
        "recipes-noise-scale",
        "recipes/accumulation.py",
        "small = squared_norm(trained) * (self.per_rank / size) ** 2",
        "small = squared_norm(trained) * (self.per_rank / size)",
        "the squared norm of a part is scaled as a norm",
        ("tests/unit/test_large_batch*", "tests/unit/test_noise_scale*"),
    ),
    Mutant(
        "pipeline-number",
        "pipeline/step.py",
        "self.number, self.short = max(number for *_, number in said)",
        "self.number, self.short = min(number for *_, number in said)",
        "after a failed step ranks go on from the lowest step, and draw the keys of another again",
        ("tests/unit/test_pipeline*", "tests/dist/test_pipeline*"),
    ),
    Mutant(
        "strategies-agreed",
        "strategies/local_steps/slowmo.py",
        'return {"momentum": self.momentum} if self.config.average else {}',
        "return {}",
        "a rank that comes back keeps its own slow momentum",
        ("tests/unit/test_regroup*", "tests/unit/test_local_steps*", "tests/laws/test_strategies*"),
    ),
    Mutant(
        "federated-token",
        "federated/server.py",
        "contact.version, contact.token = message.version, 0",
        "contact.version = message.version",
        "a client may say twice which version it holds, or answer after that",
        ("tests/unit/test_federated*",),
    ),
    Mutant(
        "plan-late-buckets",
        "tools/plan/step.py",
        "begin = max(ready + late, done)",
        "begin = max(ready, done)",
        "messages that take time from backward do not delay later buckets",
        ("tests/unit/test_plan*",),
    ),
    Mutant(
        "replicator-staleness",
        "replicator/servers/parameter_shard.py",
        "if staleness > self.limit:",
        "if staleness >= self.limit:",
        "a gradient just as old as allowed is refused",
        ("tests/unit/test_replicator*",),
    ),
    Mutant(
        "methods-warm-answers",
        "methods/dgc.py",
        "higher = [max(stage, select.density) for stage in stages]",
        "higher = [*stages]",
        "answers of a server are sparser in the warm-up than after it",
        ("tests/unit/test_dgc*", "tests/unit/test_server*"),
    ),
    Mutant(
        "tasks-older-checkpoint",
        "tools/tasks/checkpoint.py",
        "if step_of(path) < step_of(place)]",
        "if step_of(path) <= step_of(place)]",
        "the error for a damaged checkpoint names that checkpoint as the one to resume from",
        ("tests/unit/test_tasks_checkpoint*",),
    ),
    Mutant(
        "cli-patience",
        "tools/cli/fits.py",
        "if not any(isinstance(strategy_or_method(spec), Strategy) for spec in specs):",
        "if not all(isinstance(strategy_or_method(spec), Strategy) for spec in specs):",
        "--patience is refused where one of several specs is no strategy",
        ("tests/unit/test_cli*",),
    ),
)
