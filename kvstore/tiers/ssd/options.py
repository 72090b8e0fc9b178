"""How RocksDB is opened: for the catalogue, and for the payload of the layout "rocksdb".

Few and small buffers: they are the daemon's memory, and each takes the disk twice while it is
written out. So those of payload, and the log, go by `ssd.size` (budget.py).
"""

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options

from kvstore.tiers.ssd.budget import Budget

WRITE_BUFFER_BYTES = 16 << 20
WRITE_BUFFERS_MAX = 2
BLOCK_CACHE_BYTES = 1 << 20
"""Small: records are read once, in order, at the start."""

TABLE_BLOCK_BYTES = 16 << 10
MANIFEST_BYTES_MAX = 4 << 20
LOG_BYTES_MAX = 1 << 20
LOG_FILES_MAX = 2
OPEN_FILES_MAX = 256
BACKGROUND_JOBS_MAX = 2

PAYLOAD_FAMILY = "payload"
PAYLOAD_BUFFERS_MAX = 3
"""Each becomes a blob file; one is filled while others are written out."""

BLOB_BYTES_MIN = 4096
BLOB_FILE_BYTES_MIN, BLOB_FILE_BYTES_MAX = 4 << 20, 64 << 20
AGE_CUTOFF = "blob_garbage_collection_age_cutoff"
"""Which share of the blob files, the oldest, every compaction writes anew; 0 except while `Blobs.collect` runs."""

BLOB_READAHEAD_BYTES = 2 << 20


def options(budget: Budget, *, payload: bool = False) -> Options:
    """Of a database; `payload`: one that may get a further column family."""
    made = Options(raw_mode=True)
    made.create_if_missing(True)
    made.create_missing_column_families(payload)
    log_bytes = budget.log_bytes if payload else budget.catalogue_log_bytes
    made.set_write_buffer_size(min(WRITE_BUFFER_BYTES, log_bytes // 2))
    made.set_max_write_buffer_number(WRITE_BUFFERS_MAX)
    made.set_max_total_wal_size(log_bytes)
    made.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    made.set_max_background_jobs(BACKGROUND_JOBS_MAX)
    made.set_max_open_files(OPEN_FILES_MAX)
    made.set_max_log_file_size(LOG_BYTES_MAX)
    made.set_keep_log_file_num(LOG_FILES_MAX)
    made.set_stats_dump_period_sec(0)
    made.set_stats_persist_period_sec(0)
    # Hashes do not compress.
    made.set_compression_type(DBCompressionType.none())
    made.set_paranoid_checks(True)
    # A torn end of the log is what every crash leaves; what follows it was never acknowledged.
    made.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    tables = BlockBasedOptions()
    tables.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    tables.set_block_size(TABLE_BLOCK_BYTES)
    made.set_block_based_table_factory(tables)
    return made


def payload_options(budget: Budget) -> Options:
    """Values in blob files: compaction of keys leaves them where they are until too much of a file is garbage."""
    made = Options(raw_mode=True)
    made.set_write_buffer_size(budget.buffer_bytes)
    made.set_max_write_buffer_number(PAYLOAD_BUFFERS_MAX)
    made.set_compression_type(DBCompressionType.none())
    made.set_enable_blob_files(True)
    made.set_min_blob_size(BLOB_BYTES_MIN)
    made.set_blob_file_size(min(max(budget.buffer_bytes, BLOB_FILE_BYTES_MIN), BLOB_FILE_BYTES_MAX))
    made.set_blob_compression_type(DBCompressionType.none())
    made.set_enable_blob_gc(True)
    made.set_blob_gc_age_cutoff(0.0)
    made.set_blob_gc_force_threshold(1.0)
    made.set_blob_compaction_readahead_size(BLOB_READAHEAD_BYTES)
    tables = BlockBasedOptions()
    tables.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    made.set_block_based_table_factory(tables)
    return made
