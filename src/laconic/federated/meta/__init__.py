"""Meta-learning among agents: one first model from which each new task is learned in few steps.

Each agent has one task. `PSGA` climbs from the agents' own models to a common one; `Averaging` and
`MetaGradient` are what it is compared with: the mean of local models, Reptile, and MAML of both orders.
"""

from laconic.federated.meta.averaging import Averaging as Averaging
from laconic.federated.meta.energy import Energy as Energy
from laconic.federated.meta.evaluation import few_step as few_step
from laconic.federated.meta.learner import Learner as Learner
from laconic.federated.meta.learner import Mlp as Mlp
from laconic.federated.meta.local import Local as Local
from laconic.federated.meta.maml import MetaGradient as MetaGradient
from laconic.federated.meta.psga import PSGA as PSGA
from laconic.federated.meta.rotated import RotatedDigits as RotatedDigits
from laconic.federated.meta.sinusoids import Sinusoids as Sinusoids
from laconic.federated.meta.trained import Trained as Trained
