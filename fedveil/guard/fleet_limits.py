"""All named limits of the fleet port. Byte limits apply to data that a site sends, and rates are per site."""

from __future__ import annotations

from fedveil.wire import flower_objects
from fedveil.wire.chunking import MAX_REPLY_SLICES, SLICE_BYTES

# Heartbeats. Flower's SuperNode sends one every 30 s; Flower's own bound would let a dead site look online for an hour.
MIN_HEARTBEAT_SECONDS = 10.0
MAX_HEARTBEAT_SECONDS = 60.0

# Maximum reply size for an instruction whose group_id does not state one.
DEFAULT_REPLY_BYTES = 1 << 30
MAX_ERROR_REPLY_BYTES = 64 << 10
# In addition to the upload itself: a reply's headers, names and records.
EXTRA_REPLY_BYTES = 1 << 20
# How many times the maximum reply size a site may send for one instruction, over all attempts.
MAX_UPLOADS_OF_A_REPLY = 8

# A tree with 4,096 objects locks Flower's database for 3 s. This limit rules out replies over 2.67 GB.
EXTRA_TREE_NODES = 16
MAX_TREE_NODES = 2 * MAX_REPLY_SLICES + EXTRA_TREE_NODES
MAX_RECORDS = 4

MAX_CHUNK_BYTES = SLICE_BYTES
MAX_ARRAY_BODY_BYTES = flower_objects.MAX_ARRAY_BODY_BYTES
MAX_BODY_BYTES = flower_objects.MAX_BODY_BYTES
BODY_BYTES_OF_A_SLICE = flower_objects.BODY_BYTES_OF_A_SLICE

# A site's clock may be 305 s behind, the limit in Flower's own check of signed times.
MAX_CLOCK_SECONDS = 400.0
# Text before the server's time in its answer to a call without a key; fedveil/console/doctor/checks.py parses it.
SHOWS_TIME = "the server's clock shows "
TTL_TOLERANCE_SECONDS = 0.1  # Flower's own tolerance is also 0.1 s
MAX_RUNTIME_SECONDS = 3e6

# Staging.
MAX_OPEN_REPLIES = 2  # a third drops the oldest: a refusal would lock out a site killed twice during an upload
MAX_SPOOL_BYTES = 8 << 30  # for all sites' second open replies; each site's largest open reply has its own space
REMEMBERED_DROPPED_REPLIES = 8  # per site: late pushes for these replies do not make the site rogue
IDLE_SECONDS = 1200.0  # above MAX_BODY_SECONDS: a part that has not wholly arrived is no object yet
MAX_STORAGE_ERRORS = 10  # disk or database errors while one reply is pushed; after that, the reply is refused
STORAGE_ERROR_SECONDS = 3600.0  # time after which such errors are forgotten
MAX_HAND_OVER_TRIES = 10
SWEEP_SECONDS = 30.0
MAX_FREE_DATABASE_BYTES = 256 << 20

# Cached data about a site, used to answer its calls without the database.
REMEMBERED_INSTRUCTIONS = 4
MAX_PULLS_OF_AN_OBJECT = 4  # per delivery of the object's instruction
MAX_COUNTED_DELIVERIES = 16

# Calls per minute.
CALLS_A_MINUTE = {
    "activate_node": 6,
    "deactivate_node": 6,
    "send_node_heartbeat": 30,
    "pull_messages": 3600,  # poll_backoff.py polls at most every 20 ms, and that often only with a single site
    "get_run": 60,
    "get_fab": 60,
    "confirm_message_received": 600,
    "push_messages": 600,  # a secure-aggregation round has several of these calls
}
ANNOUNCED_BYTES_A_MINUTE = 16 << 20

# Before a call is parsed.
MAX_OBJECT_CALL_BYTES = 8 << 20
MAX_ANNOUNCEMENT_CALL_BYTES = 2 << 20
MAX_CALL_BYTES = 64 << 10
MAX_OPEN_CALLS = 8
MAX_BODY_SECONDS = 900.0  # two slices at once take 524 s over a 5 kB/s connection
MAX_STREAMS_OF_A_CONNECTION = 32

# Lines in the control log.
REFUSAL_LINE_SECONDS = 60.0
ROGUE_REFUSALS_A_MINUTE = 20
