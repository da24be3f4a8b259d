#!/bin/sh
# Exit code 0 if Redis answers and is not loading its append-only file. MISCONF: its disk is full; it answers what reads, and
# to start it again would not help. Where it has users, `check` may ask without a password, and nothing but this.
set -eu
if [ -n "${REDIS_USERS_FILE:-}" ]; then
  set -- --user check
  REDISCLI_AUTH=any
else
  REDISCLI_AUTH="$(cat "${REDIS_PASSWORD_FILE:?}")"
fi
export REDISCLI_AUTH
if [ -n "${REDIS_TLS_FOLDER:-}" ]; then
  set -- "$@" --tls --cacert "$REDIS_TLS_FOLDER/ca.crt"
fi
case "$(redis-cli "$@" ping)" in
  PONG | MISCONF*) ;;
  *) exit 1 ;;
esac
