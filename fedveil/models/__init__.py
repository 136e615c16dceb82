"""Base models: loading, attaching an adapter, and locating their tensors."""
