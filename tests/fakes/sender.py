"""Stands in for services/weight_sync/sender.py: obeys every order and sends nothing.

FAKE_SENDER=deaf: ends at the first broadcast; FAKE_SENDER=broken: cannot listen.
"""

import json
import os
import sys

for line in sys.stdin:
    order = json.loads(line)
    how = os.environ.get("FAKE_SENDER", "")
    if how == "deaf" and "send" in order:
        sys.exit(1)
    answer = {"error": "no port"} if how == "broken" else {"port": 1} if "listen" in order else {"bytes": 1}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
