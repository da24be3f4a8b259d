#!/bin/sh
# Start Redis with its password from a file: never in the arguments, the environment or the image.
#   start.sh    reads /etc/lagrange-redis/redis.conf and REDIS_PASSWORD_FILE; REDIS_MAXMEMORY bounds the memory
# REDIS_TLS_FOLDER (tls.crt, tls.key, ca.crt; as in a Kubernetes TLS secret): then only TLS is spoken, on the same port.
set -eu
umask 077
conf=/tmp/redis.conf
cp /etc/lagrange-redis/redis.conf "$conf"
{
  printf 'requirepass %s\n' "$(cat "${REDIS_PASSWORD_FILE:?name the file that holds the password}")"
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:-1gb}"
  if [ -n "${REDIS_TLS_FOLDER:-}" ]; then
    printf 'tls-port %s\nport 0\n' "$(sed -n 's/^port //p' /etc/lagrange-redis/redis.conf)"
    printf 'tls-cert-file %s/tls.crt\ntls-key-file %s/tls.key\n' "$REDIS_TLS_FOLDER" "$REDIS_TLS_FOLDER"
    printf 'tls-ca-cert-file %s/ca.crt\ntls-auth-clients no\ntls-protocols "TLSv1.2 TLSv1.3"\n' "$REDIS_TLS_FOLDER"
  fi
} >> "$conf"
exec redis-server "$conf"
