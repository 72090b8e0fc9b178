"""L3, the bytes on the SSD: preallocated segment files for the payload, RocksDB for the catalogue.

`SsdDirectory` opens what is on disk, `SsdTier` carries out jobs on it in threads of its own
and reports. Nothing here decides: the core chooses segments, slots, what goes and what stays.
"""
