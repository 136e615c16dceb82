#!/bin/sh
# What several people do on several machines, done on one host for compose.yaml. Everybody gets their own files alone:
#
#   trial.sh server              /federation the operator's, /keys the CA's key and the standby key, /server the SuperLink's,
#                               /secret its SuperExec's, with the key that signs instructions, /roster the sites' signing keys
#   trial.sh site NAME NUMBER    /kit and /keys the SuperNode's, /secret what the process that runs apps may see too: its secret,
#                               the site's signing key, policy and the server's instruction keys
#
# /handover is what goes from one to the other: kits, requests, and the digest of the app. Nothing secret.
set -eu
case $1 in
server)
  if [ -e /federation/trial ]; then exit 0; fi
  rm -rf /federation/new
  fedveil provision /trial.toml --out /federation/new
  cd /federation/new
  sed -i 's:/federation/new/:/federation/trial/:' server/flower/config.toml server/compose.yaml
  mv ca/ca.key ca/instruction-standby.key /keys/
  mv server/instruct/instruction.key /secret/       # the SuperLink sees /federation
  cp server/ca.crt server/server.pem server/server.key server/superexec-secret /server/
  cp server/ca.crt server/superexec-secret /secret/
  cp server/roster/signers.json /roster/            # which lies over this folder from now on
  fedveil app digest >/handover/app-digest
  cp -r kits /handover/
  mv /federation/new /federation/trial
  ;;
site)
  if [ -e "/kit/containers.toml" ]; then exit 0; fi
  tar -xzf "/handover/kits/$2.tar.gz" -C /tmp
  cd "/tmp/trial-$2"
  sha256sum -c --quiet SHA256SUMS
  cat >/secret/site-policy.toml <<POLICY
methods = ["fedavg", "fedrand"]
tasks = ["text-generation"]
models = ["tiny"]
app-digests = ["$(cat /handover/app-digest)"]
max-rounds = 10
max-bytes-a-round = 50_000_000
require-signed-instructions = true

[permits]
"train.batch-size" = {min = 4, max = 64}
"train.learning-rate" = {min = 1e-5, max = 1e-2}
"train.max-steps" = {min = 1, max = 100}
"cohort.sites" = {min = 2, max = 10}
"task.evaluation" = "/data"
"evaluate.eval-examples" = {min = 1, max = 1000}
"run.name" = {pattern = "[a-z0-9-]*"}
"secure.enabled" = [true, false]
"secure.roster" = ["", "/roster/roster.json"]
POLICY
  # The three share one folder of rows: each takes a third.
  cp instruction-keys.toml /secret/
  sed -i 's:/kit/site-policy.toml:/secret/site-policy.toml:; s:/kit/instruction-keys.toml:/secret/instruction-keys.toml:' containers.toml
  printf 'partition-id = %d\nnum-partitions = 3\n' "$3" >>containers.toml
  fedveil site init --kit . --out /keys --secret /secret/superexec-secret --renew
  mkdir -p /handover/requests
  cp /keys/request.json "/handover/requests/$2.json"
  cp ca.crt site.toml containers.toml /kit/
  ;;
esac
