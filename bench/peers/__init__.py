"""Other stores beside ours: `make bench-peers`. Each runs in an environment of its own, all of them in one run.

    environments  makes .venv-peers/<name>/, or says why it cannot
    servers       their processes: loopback and Unix sockets only, ended by pid
    rotation      which turns are taken, and what the figures of a row are
    arm           the other side of a turn: one process for each peer's client
    *_arm         what a put, a get and a lookup are for each of them

The arms run in their peers' environments, which do not know the project: they import only
`bench.peers.arm`, the standard library, numpy and their peer.
"""
