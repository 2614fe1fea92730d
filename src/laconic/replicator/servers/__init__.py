"""Servers: ranks that have parameters and apply the gradients pushed by workers.

    worker                                              server
    open: config of the optimiser, its tensors     -->  builds its shard of it at the first call
                                                   <--  version of its tensors, and the tensors
    push: a gradient of version v, encoded         -->  version - v updates came first: its staleness
                                                   <--  new version and tensors, applied or rejected
    bye                                            -->

Each worker has its own connection and thread on each server, so the loss of one does not affect others.
"""
