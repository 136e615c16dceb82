"""The compose files that provisioning writes: one for the server's host, and one for each site's host.

Every service runs as user 10001 on a read-only root, without capabilities, and starts nothing from outside. The table
lists what each service can see and reach. The repository's compose.yaml is the same on one host, for trying it out.

| service | sees | reaches |
|---|---|---|
| pod | nothing | publishes the fleet port; the next three services share its loopback, which has the control port |
| superlink | server certificate and key, the registry, its database and its control-port log | |
| serverapp | run folders, evaluation data, models, the roster of site signing keys, the instruction key | |
| operator | the output of `fedveil provision` | the control port; runs on demand |
| supernode | the site's key | the server, and the network between it and clientapp |
| clientapp | the site's data, models, policy, private state and signing key | only that network |
"""

from __future__ import annotations

from fedveil.console.provisioning.federation_folder import FederationFile
from fedveil.guard import poll_backoff

_HEAD = """\
x-common: &common
  image: {image}
  restart: unless-stopped
  read_only: true
  user: "10001:10001"
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  tmpfs: ["/tmp:mode=1777"]
  mem_limit: ${{FEDVEIL_MEMORY:-16g}}     # per service; a site's clientapp holds the base model
  cpus: ${{FEDVEIL_CPUS:-2}}
  pids_limit: 1024
  logging: {{driver: json-file, options: {{max-size: 10m, max-file: "5"}}}}     # at most 50 MB of output per service
  environment: &environment
    FLWR_HOME: /state/flower
    FLWR_TELEMETRY_ENABLED: "0"
    FLWR_DISABLE_UPDATE_CHECK: "1"
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION: "1"
    HF_HUB_OFFLINE: "1"
    FEDVEIL_POLL_SECONDS: ${{FEDVEIL_POLL_SECONDS:-{poll:g}}}   # a SuperNode's initial delay between polls
x-service: &service
  <<: *common
  healthcheck: &health
    test: [CMD, fedveil, doctor, --health, "127.0.0.1:9097"]
    interval: 10s
    timeout: 10s
    retries: 12
    start_period: 20s
x-tool: &tool
  <<: *common
  cpus: 1                     # so that doctor, which checks the other services' limit, runs on a single-core host
  restart: "no"
"""

_SERVER = """\
# The server of {federation}. Publishes the fleet port; only `operator` reaches its control port.
# This folder holds the server's secrets. User 10001 must be able to read them, and to write the registry:
# chown -R 10001:10001 . in the parent folder.
name: fedveil-{project}-server
{head}services:
  pod:                        # keeps the loopback that the next three services share while any of them restarts
    <<: *common
    command: [sleep, infinity]
    ports: ["{port}:9092"]
    stop_grace_period: 1s
  superlink:
    <<: *service
    command:
      - flower-superlink
      - --fedveil-registry=/registry
      - --fedveil-log=/state/control-log.jsonl
      - --host=${{FEDVEIL_CONTROL_HOST:-127.0.0.1}}
      - --port={control}
      - --fleet-api-address=0.0.0.0:9092
      - --ssl-ca-certfile=/server/ca.crt
      - --ssl-certfile=/server/server.pem
      - --ssl-keyfile=/server/server.key
      - --enable-supernode-auth
      - --isolation=process
      - --superexec-auth-secret-file=/server/superexec-secret
      - --disable-runtime-dependency-installation
      - --database=/state/superlink.db
      - --health-server-address=127.0.0.1:9097
    network_mode: service:pod
    volumes:                  # not the whole folder: ./instruct has the key that signs instructions
      - ./ca.crt:/server/ca.crt:ro
      - ./server.pem:/server/server.pem:ro
      - ./server.key:/server/server.key:ro
      - ./superexec-secret:/server/superexec-secret:ro
      - ../registry:/registry:ro
      - state:/state
    stop_grace_period: 5s
  serverapp:                  # runs the app's ServerApp; run.dir "runs" is the volume
    <<: *service
    command:
      - flower-superexec
      - --runtime-api-address=127.0.0.1:{control}
      - --root-certificates=/server/ca.crt
      - --superexec-auth-secret-file=/server/superexec-secret
      - --health-server-address=127.0.0.1:9098
    healthcheck:
      <<: *health
      test: [CMD, fedveil, doctor, --health, "127.0.0.1:9098"]
    network_mode: service:pod
    working_dir: /
    environment:
      <<: *environment
      FEDVEIL_INSTRUCTION_KEY: /instruct/instruction.key
      FEDVEIL_SIGNERS: /roster/signers.json
      FEDVEIL_BUNDLES: /instruct/bundles.toml     # optional: the bundles that may run here
    volumes:                  # not the server's key
      - ./ca.crt:/server/ca.crt:ro
      - ./superexec-secret:/server/superexec-secret:ro
      - ./roster:/roster:ro     # secure.roster="/roster/roster.json"
      - ./instruct:/instruct:ro
      - app-state:/state
      - runs:/runs
      - ${{FEDVEIL_DATA:-./data}}:/data:ro
      - ${{FEDVEIL_MODELS:-./models}}:/models:ro
    stop_grace_period: 5s
    depends_on:
      superlink: {{condition: service_healthy}}
  operator:                   # docker compose run --rm operator fedveil members list {folder}
    <<: *tool
    profiles: [operator]
    network_mode: service:pod
    working_dir: /
    volumes: ["..:{folder}", "runs:/runs"]
volumes:
  state: {{}}
  app-state: {{}}
  runs: {{}}
"""

_SITE = """\
# Site {site} of {federation}. Connects to {superlink} alone; publishes no port.
name: fedveil-{project}
{head}services:
  init:                       # docker compose run --rm -T init >request.json: makes this site's keys and request
    <<: *tool
    profiles: [init]
    network_mode: none
    entrypoint: [fedveil, site, init, --kit, /kit, --out, /keys, --secret, /secret/superexec-secret, --print]
    volumes: ["./:/kit:ro", "keys:/keys", "secret:/secret"]
  doctor:                     # docker compose run --rm doctor: runs only this image's code, so it may see everything
    <<: *tool
    profiles: [doctor]
    entrypoint: [fedveil, doctor, --kit, /kit, --keys, /keys, --node-config, /kit/containers.toml]
    volumes:
      - ./:/kit:ro
      - keys:/keys:ro
      - secret:/secret:ro
      - state:/state
      - ${{FEDVEIL_DATA:-./data}}:/data:ro
    networks: [outside]
  supernode:
    <<: *service
    command:
      - flower-supernode
      - --root-certificates=/kit/ca.crt
      - --superlink={superlink}
      - --auth-supernode-private-key=/keys/node.key
      - --isolation=process
      - --superexec-auth-secret-file=/secret/superexec-secret
      - --host=0.0.0.0
      - --port=9094
      - --health-server-address=127.0.0.1:9097
      - --node-config=/kit/containers.toml
    environment:
      <<: *environment
      FEDVEIL_HEARTBEAT_FILE: /tmp/heartbeat
    healthcheck:              # also unhealthy while the server does not answer this site's heartbeats
      <<: *health
      test: [CMD, fedveil, doctor, --health, "127.0.0.1:9097", --heartbeat, /tmp/heartbeat]
    volumes: ["./:/kit:ro", "keys:/keys:ro", "secret:/secret:ro", "node-state:/state"]
    networks: [inside, outside]
    stop_grace_period: 5s
  clientapp:                  # runs the permitted app; sees the data; has no outside network
    <<: *service
    command:
      - flower-superexec
      - --runtime-api-address=supernode:9094
      - --insecure             # only on the network between these two; the secret authenticates them
      - --superexec-auth-secret-file=/secret/superexec-secret
      - --health-server-address=127.0.0.1:9097
    volumes:                  # not the volume with the node key; the signing key is in `secret`
      - ./site-policy.toml:/kit/site-policy.toml:ro
      - ./instruction-keys.toml:/kit/instruction-keys.toml:ro
      - secret:/secret:ro
      - state:/state
      - ${{FEDVEIL_DATA:-./data}}:/data:ro
      - ${{FEDVEIL_MODELS:-./models}}:/models:ro
    networks: [inside]
    stop_grace_period: 5s
    depends_on:
      supernode: {{condition: service_healthy}}
networks:
  inside: {{internal: true}}
  outside: {{}}
volumes:
  keys: {{}}
  secret: {{}}
  state: {{}}
  node-state: {{}}
"""

_GPU = """\
# docker compose -f compose.yaml -f compose.gpu.yaml up -d --wait, with an image built for GPUs
services:
  {service}:
    deploy:
      resources:
        reservations:
          devices: [{{driver: nvidia, count: 1, capabilities: [gpu]}}]
"""

_OPERATORS = """\
# FEDVEIL_CONTROL_HOST=0.0.0.0 docker compose -f compose.yaml -f compose.operators.yaml up -d --wait
# For operators on other machines, who reach the control port on this host's loopback through SSH.
services:
  pod:
    ports: ["127.0.0.1:{control}:{control}"]
"""


def server_compose(federation: FederationFile, folder: str) -> str:
    """Return compose.yaml for the server's host, which publishes the fleet port; `folder`: the federation's folder."""
    head = _HEAD.format(image=federation.image, poll=poll_backoff.patch_site_polling(len(federation.sites)))
    return _SERVER.format(
        head=head,
        federation=federation.name,
        project=_project(federation.name),
        port=federation.fleet_port,
        control=federation.control_port,
        folder=folder,
    )


def site_compose(federation: FederationFile, name: str) -> str:
    """Return compose.yaml for a site's kit."""
    head = _HEAD.format(image=federation.image, poll=poll_backoff.patch_site_polling(len(federation.sites)))
    about = {"federation": federation.name, "project": _project(name), "superlink": federation.superlink}
    return _SITE.format(head=head, site=name, **about)


def operators_override(federation: FederationFile) -> str:
    """Return the override that publishes the control port on the host's loopback."""
    return _OPERATORS.format(control=federation.control_port)


def gpu_override(service: str) -> str:
    """Return the override that gives one GPU to a service."""
    return _GPU.format(service=service)


def _project(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())
