"""Recorded episodes. One record is one zstd frame with one line of versioned JSON, written whole and flushed.

`EpisodeWriter` appends records, `read_episodes` reads them in order, and `Recording` opens a folder of any size by its index.
"""

from agentrl.store.episode_files import (
    EpisodeWriter,
    all_records,
    episodes_folder,
    read_episodes,
    read_records,
    truncate,
)
from agentrl.store.episode_index import IndexEntry
from agentrl.store.episode_record import (
    VERSION,
    decode,
    encode,
    exactness_violations,
    extra_fields,
    from_record,
    to_record,
)
from agentrl.store.recording import Recording

__all__ = [
    "VERSION",
    "EpisodeWriter",
    "IndexEntry",
    "Recording",
    "all_records",
    "decode",
    "encode",
    "episodes_folder",
    "exactness_violations",
    "extra_fields",
    "from_record",
    "read_episodes",
    "read_records",
    "to_record",
    "truncate",
]
