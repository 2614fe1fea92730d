"""Names in papers and other libraries for names registered here."""

from __future__ import annotations

RANDOMK, TOPK, THRESHOLD = "randomk(density=...)", "topk(density=...)", "threshold(value=...)"
ALIASES: dict[str, tuple[str, ...]] = {
    "allgather": ("gather(...)",),
    "allreduce": ("sum()",),
    "decoupled_momentum": ("demo()",),
    "deep_gradient_compression": ("dgc()",),
    "distro": ("demo()",),
    "ef": ("error_fed(...)", "error_feedback()"),
    "efsgd": ("error_fed(...)",),
    "ef_signsgd": ("signmean()",),
    "elias": ("qsgd(coding='elias')",),
    "float16": ("fp16()",),
    "half": ("fp16()",),
    "bfloat16": ("bf16()",),
    "gradient_dropping": (TOPK, THRESHOLD),
    "latent_dirichlet_allocation": ("lda(alpha=...)",),
    "majority": ("majority_vote()",),
    "muloco": ("diloco()",),
    "natural_compression": ("natural()",),
    "non_iid": ("label_shards()", "dirichlet(alpha=...)", "classes_per_client(...)"),
    "none": ("dense()",),
    "no_compression": ("dense()",),
    "one_bit_adam": ("onebit_adam()",),
    "one_bit": ("signmean()", "sign()"),
    "parameter_server": ("server(...)",),
    "ps": ("server(...)",),
    "qsgd_elias": ("qsgd(coding='elias')",),
    "qsgd_l2": ("qsgd(norm='l2')",),
    "qsgd_linf": ("qsgd(norm='max')",),
    "qsgd_max": ("qsgd(norm='max')",),
    "randk": (RANDOMK,),
    "random_k": (RANDOMK,),
    "rice": ("golomb()", "qsgd(coding='rice')"),
    "sparse_ternary_compression": ("stc()",),
    "streaming_diloco": ("diloco(fragments=4, overlap=5, mix=0.5)",),
    "strom": (THRESHOLD,),
    "top_k": (TOPK,),
    "topk_sgd": (TOPK,),
    "zero_one": ("zero_one_adam()",),
}


def canonical_names(name: str) -> tuple[str, ...]:
    """Return the registered specs of a name from papers; () for an unknown name.

    >>> canonical_names("EF-SignSGD".replace("-", "_")), canonical_names("1x")
    (('signmean()',), ())
    """
    plain = name.lower().replace("_", "")
    return next((calls for known, calls in ALIASES.items() if known.replace("_", "") == plain), ())
