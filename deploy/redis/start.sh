#!/bin/sh
# Start Redis with its password from a file: never in the arguments, the environment or the image.
#   start.sh    reads /etc/redis/redis.conf and REDIS_PASSWORD_FILE; REDIS_MAXMEMORY bounds the memory
set -eu
umask 077
conf=/tmp/redis.conf
cp /etc/redis/redis.conf "$conf"
{
  printf 'requirepass %s\n' "$(cat "${REDIS_PASSWORD_FILE:?name the file that holds the password}")"
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:-1gb}"
} >> "$conf"
exec redis-server "$conf"
