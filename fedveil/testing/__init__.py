"""Access to FedVeil's internals, for benchmarks and system tests that measure individual parts.

These modules re-export internal functions and classes. They have no compatibility guarantee: a name may change or
disappear in any release. Programs that use FedVeil should use the other modules in the Python reference. No other part
of FedVeil imports this package.

| module | contents |
|---|---|
| `deployment` | a federation over gRPC on this machine |
| `simulation` | the app on Flower's simulation engine |
| `server_loop` | the server's side of a round, with any Grid in place of Flower's |
| `messages` | slices, headers and codes of messages |
| `secagg` | the two halves of secure aggregation |
| `lying_server` | a server that lies to real sites, and computes what it can from their answers |
| `lying_server_games`, `lying_server_search` | games with that server, and the search for one that breaks the claim |
| `planner` | memory planning for a site |
| `training` | the parts of a client's training |
| `pretraining` | the images that the bundled bases were pretrained on |
| `tensor_ops` | tensor operations whose cost is measured |
"""
