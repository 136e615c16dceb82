"""FedVeil's internals for benchmarks and tests of the system, which need access to the part that they measure.

These modules name functions and classes of FedVeil's own parts. No promise of compatibility covers them: a name may
change or go with any release. Programs that use FedVeil take the modules that the reference of Python describes
besides. Nothing else in FedVeil imports this package.

| module | holds |
|---|---|
| `deployment` | a federation over gRPC on this machine |
| `simulation` | the app on Flower's simulation engine |
| `server_loop` | the server's side of a round, with any Grid in the place of Flower's |
| `messages` | slices, headers and codes of messages |
| `secagg` | the two halves of secure aggregation |
| `lying_server` | a server that lies to real sites, and what it can compute from their answers |
| `lying_server_games`, `lying_server_search` | games of that server, and the search for one that breaks the claim |
| `planner` | the plan of a site's memory |
| `training` | a client's training in parts |
| `pretraining` | the pictures that the bundled bases were trained on |
| `tensor_ops` | operations on tensors whose cost is measured |
"""
