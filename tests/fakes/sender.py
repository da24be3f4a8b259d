"""Stands in for services/weight_sync/sender.py: obeys every order and sends nothing.

FAKE_SENDER=deaf: ends at the first broadcast; FAKE_SENDER=broken: cannot listen; FAKE_SENDER=blind: cannot prepare.
FAKE_SENDER_LOG: file to which it writes the first word of each order.
"""

import json
import os
import sys
from pathlib import Path

for line in sys.stdin:
    order = json.loads(line)
    how = os.environ.get("FAKE_SENDER", "")
    if "FAKE_SENDER_LOG" in os.environ:
        with Path(os.environ["FAKE_SENDER_LOG"]).open("a", encoding="utf-8") as log:
            log.write(f"{next(iter(order))}\n")
    if how == "deaf" and "send" in order:
        sys.exit(1)
    broken = how == "broken" or (how == "blind" and "prepare" in order)
    answer = {"error": "no port"} if broken else {"port": 1} if "listen" in order else {"bytes": 1}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
