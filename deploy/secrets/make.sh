#!/bin/sh
# Make the secrets of a compose installation, each a random word in a file of its own; existing ones are kept.
#   deploy/secrets/make.sh
# The folder is closed to other users; the files are readable inside the containers, whose user is 10001 (Redis: 999).
set -eu
cd "$(dirname "$0")"
chmod 0700 .
for name in redis_worker_password redis_trainer_password redis_weight_sync_password redis_engine_password \
  redis_monitor_password redis_evaluator_password redis_operator_password api_token engine_api_key grafana_password; do
  if [ ! -s "$name" ]; then
    python3 -c 'import secrets; print(secrets.token_urlsafe(32), end="")' > "$name"
    echo "made deploy/secrets/$name"
  fi
  chmod 0444 "$name"
done
