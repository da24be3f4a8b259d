#!/bin/sh
# Exit code 0 if Redis answers to its password and is not loading its append-only file.
set -eu
REDISCLI_AUTH="$(cat "${REDIS_PASSWORD_FILE:?}")"
export REDISCLI_AUTH
[ "$(redis-cli ping)" = PONG ]
