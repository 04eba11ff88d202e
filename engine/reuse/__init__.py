"""Reuse: what is cached, what of it fits a prompt, and the plan that says so. No tensors."""
