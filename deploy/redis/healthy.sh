#!/bin/sh
# Exit code 0 if Redis answers to its password and is not loading its append-only file.
set -eu
REDISCLI_AUTH="$(cat "${REDIS_PASSWORD_FILE:?}")"
export REDISCLI_AUTH
if [ -n "${REDIS_TLS_FOLDER:-}" ]; then
  set -- --tls --cacert "$REDIS_TLS_FOLDER/ca.crt"
fi
[ "$(redis-cli "$@" ping)" = PONG ]
