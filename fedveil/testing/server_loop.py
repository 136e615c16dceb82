"""The server's side of a round without a network: its strategy, its folder, and its upload checks.

The strategy accepts any object with Flower's Grid interface, so a program can answer in place of the sites.

Not covered by the compatibility promise.
"""

from __future__ import annotations

from fedveil.server_app.distillation import ServerDistillation
from fedveil.server_app.flower_strategy import MethodStrategy
from fedveil.server_app.round_record import RoundRecord
from fedveil.server_app.run_folder import RunFolder
from fedveil.server_app.run_settings import RunSettings
from fedveil.server_app.upload_limits import UploadLimits
from fedveil.server_app.upload_validation import check_upload

__all__ = [
    "MethodStrategy",
    "RoundRecord",
    "RunFolder",
    "RunSettings",
    "ServerDistillation",
    "UploadLimits",
    "check_upload",
]
