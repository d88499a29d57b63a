from gloo_pool import gloo_pool

__all__ = ["gloo_pool"]
