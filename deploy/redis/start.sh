#!/bin/sh
# Start Redis, protected by what a file holds: no password is in the arguments, the environment or the image.
#   REDIS_USERS_FILE     an access control list, a user for each role: lagrange redis-users PASSWORDS --out FILE
#   REDIS_PASSWORD_FILE  else: one password, which allows everything
#   REDIS_MAXMEMORY      bounds the memory
#   REDIS_TLS_FOLDER     tls.crt, tls.key, ca.crt, as in a Kubernetes TLS secret: then only TLS is spoken, on the same port
set -eu
umask 077
conf=/tmp/redis.conf
cp /etc/lagrange-redis/redis.conf "$conf"
{
  if [ -n "${REDIS_USERS_FILE:-}" ]; then
    printf 'aclfile %s\n' "$REDIS_USERS_FILE"
  else
    printf 'requirepass %s\n' "$(cat "${REDIS_PASSWORD_FILE:?name the file that holds the users or the password}")"
  fi
  printf 'maxmemory %s\n' "${REDIS_MAXMEMORY:-1gb}"
  if [ -n "${REDIS_TLS_FOLDER:-}" ]; then
    printf 'tls-port %s\nport 0\n' "$(sed -n 's/^port //p' /etc/lagrange-redis/redis.conf)"
    printf 'tls-cert-file %s/tls.crt\ntls-key-file %s/tls.key\n' "$REDIS_TLS_FOLDER" "$REDIS_TLS_FOLDER"
    printf 'tls-ca-cert-file %s/ca.crt\ntls-auth-clients no\ntls-protocols "TLSv1.2 TLSv1.3"\n' "$REDIS_TLS_FOLDER"
  fi
} >> "$conf"
exec redis-server "$conf"
