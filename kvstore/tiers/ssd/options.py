"""How RocksDB is opened: for the catalogue, and for the payload of the layout "rocksdb".

Few and small buffers: they are the daemon's memory.
"""

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options

WRITE_BUFFER_BYTES = 16 << 20
WRITE_BUFFERS_MAX = 2
BLOCK_CACHE_BYTES = 1 << 20
"""Small: records are read once, in order, at the start."""

TABLE_BLOCK_BYTES = 16 << 10
WAL_BYTES_MAX = 64 << 20
LOG_BYTES_MAX = 1 << 20
LOG_FILES_MAX = 2
OPEN_FILES_MAX = 256
BACKGROUND_JOBS_MAX = 2

PAYLOAD_FAMILY = "payload"
PAYLOAD_BUFFER_BYTES, PAYLOAD_BUFFERS_MAX = 32 << 20, 3
"""Each becomes a blob file; one is filled while others are written out."""

BLOB_BYTES_MIN = 4096
BLOB_FILE_BYTES = 256 << 20
GARBAGE_AGE, GARBAGE_SHARE_MAX = 0.25, 0.3
"""The oldest blob files, so large a share of all, are written anew once so much of them is garbage.

All of them at once (1.0) took five times the live data while it went on, these 2.2 times.
"""

BLOB_READAHEAD_BYTES = 2 << 20


def options(*, payload: bool = False) -> Options:
    """Of a database; `payload`: one that may get a further column family."""
    made = Options(raw_mode=True)
    made.create_if_missing(True)
    made.create_missing_column_families(payload)
    made.set_write_buffer_size(WRITE_BUFFER_BYTES)
    made.set_max_write_buffer_number(WRITE_BUFFERS_MAX)
    made.set_max_total_wal_size(WAL_BYTES_MAX)
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


def payload_options() -> Options:
    """Values in blob files: compaction of keys leaves them where they are until too much of a file is garbage."""
    made = Options(raw_mode=True)
    made.set_write_buffer_size(PAYLOAD_BUFFER_BYTES)
    made.set_max_write_buffer_number(PAYLOAD_BUFFERS_MAX)
    made.set_compression_type(DBCompressionType.none())
    made.set_enable_blob_files(True)
    made.set_min_blob_size(BLOB_BYTES_MIN)
    made.set_blob_file_size(BLOB_FILE_BYTES)
    made.set_blob_compression_type(DBCompressionType.none())
    made.set_enable_blob_gc(True)
    made.set_blob_gc_age_cutoff(GARBAGE_AGE)
    made.set_blob_gc_force_threshold(GARBAGE_SHARE_MAX)
    made.set_blob_compaction_readahead_size(BLOB_READAHEAD_BYTES)
    tables = BlockBasedOptions()
    tables.set_block_cache(Cache(BLOCK_CACHE_BYTES))
    made.set_block_based_table_factory(tables)
    return made
