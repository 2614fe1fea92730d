"""Block-wise training by ADMM: the blocks of a model train concurrently, without a global backward pass."""

from laconic.admm.block_admm import BlockAdmm as BlockAdmm
from laconic.admm.cutting import cut_into as cut_into
from laconic.admm.deep_facto import DeepFacto as DeepFacto
from laconic.admm.proximal import Proximal as Proximal
from laconic.admm.stats import Stats as Stats
from laconic.admm.trainer import BlockTrainer as BlockTrainer

__all__ = ["BlockAdmm", "BlockTrainer", "DeepFacto", "Proximal", "Stats", "cut_into"]
