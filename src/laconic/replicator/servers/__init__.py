"""Servers: ranks that hold parameters, and apply the gradients that workers push to them.

    worker                                              server
    open: how the optimiser is built, its tensors  -->  builds it for its share, unless it has it
                                                   <--  the version of its tensors, and the tensors
    push: a gradient of version v, encoded         -->  version - v updates came first: its staleness
                                                   <--  the new version and tensors, applied or refused
    bye                                            -->

Every worker has a connection of its own to every server, and a server a thread for each: whoever is lost
takes nobody along.
"""
