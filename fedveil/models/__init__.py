"""Base models: loading, attaching an adapter, where their tensors stand."""
