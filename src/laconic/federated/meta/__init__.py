"""Meta-learning: one initial model from which each new task is learned in few steps.

Each agent has one task. `PSGA` is the method; baselines are `Averaging` (FedAvg, Reptile), `MetaGradient`
(MAML) and `ImplicitGradient` (iMAML).

>>> import torch
>>> learner, agents = Learner(Mlp((1, 20, 20, 1))), Sinusoids(count=5)
>>> plan = PSGA(rounds=4, up="qsgd(levels=7)", down="qsgd(levels=7)", local=Local(steps=20))
>>> found = plan.train(learner, agents, learner.network.first())
>>> bool(torch.equal(found.agents, found.weights.repeat(5, 1)))  # all agree
True
>>> few_step(learner, Sinusoids(count=100, seed=1), found.weights, shots=10).steps
(0, 1, 5, 10)
"""

from laconic.federated.meta.averaging import Averaging as Averaging
from laconic.federated.meta.descent import Descent as Descent
from laconic.federated.meta.energy import Energy as Energy
from laconic.federated.meta.evaluation import few_step as few_step
from laconic.federated.meta.imaml import ImplicitGradient as ImplicitGradient
from laconic.federated.meta.learner import Learner as Learner
from laconic.federated.meta.learner import Mlp as Mlp
from laconic.federated.meta.local import Local as Local
from laconic.federated.meta.maml import MetaGradient as MetaGradient
from laconic.federated.meta.psga import PSGA as PSGA
from laconic.federated.meta.rotated import RotatedDigits as RotatedDigits
from laconic.federated.meta.sinusoids import Sinusoids as Sinusoids
from laconic.federated.meta.trained import Trained as Trained
