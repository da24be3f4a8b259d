#!/bin/sh
# Make an authority of one's own and certificates for the services that speak TLS; existing ones are kept.
#   deploy/tls/make.sh [FOLDER]     default: this folder. Makes ca.crt, ca.key and <name>.crt, <name>.key
# Keep ca.key elsewhere afterwards: who has it can pose as any of them. They last a year: remove and make them again.
set -eu
cd "${1:-$(dirname "$0")}"
umask 077
if [ ! -s ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=lagrange" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign" \
    -keyout ca.key -out ca.crt 2>/dev/null
fi
for name in redis weight-sync monitor; do
  if [ ! -s "$name.crt" ]; then
    printf 'subjectAltName=DNS:%s,DNS:localhost\nextendedKeyUsage=serverAuth\n' "$name" > "$name.ext"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$name" -keyout "$name.key" -out "$name.csr" \
      2>/dev/null
    openssl x509 -req -in "$name.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile "$name.ext" \
      -out "$name.crt" 2>/dev/null
    rm "$name.csr" "$name.ext"
    echo "made $name.crt"
  fi
done
# Readable inside the containers, whose users are 10001 and 999; the folder is closed to others on this machine.
chmod 0444 ca.crt redis.* weight-sync.* monitor.*
chmod 0700 .
