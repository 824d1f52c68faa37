"""The record of episodes (design §9): one record is one zstd frame that holds one line of versioned JSON, written whole and flushed.

`EpisodeWriter` appends, `read_episodes` reads in order, `Recording` opens a folder of any size at once by its index.
"""

from agentrl.store.episode_files import (
    EpisodeWriter,
    all_records,
    episodes_folder,
    read_episodes,
    read_records,
    truncate,
)
from agentrl.store.episode_index import Entry
from agentrl.store.episode_record import (
    VERSION,
    decode,
    encode,
    exactness_violations,
    extras,
    from_record,
    step_record,
    to_record,
)
from agentrl.store.recording import Recording

__all__ = [
    "VERSION",
    "Entry",
    "EpisodeWriter",
    "Recording",
    "all_records",
    "decode",
    "encode",
    "episodes_folder",
    "exactness_violations",
    "extras",
    "from_record",
    "read_episodes",
    "read_records",
    "step_record",
    "to_record",
    "truncate",
]
