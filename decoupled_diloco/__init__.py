"""Decoupled DiLoCo: resilient distributed pre-training in JAX."""
