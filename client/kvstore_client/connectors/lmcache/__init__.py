"""LMCache over kvstored, in the two ways that it has for a store of somebody else's.

l2.py       under `lmcache server`, which several engines share: an L2 adapter plugin
remote.py   under LMCache within an engine: a remote storage plugin
"""
