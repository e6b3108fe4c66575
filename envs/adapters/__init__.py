"""Environments of other libraries as agent environments, and the other way round."""
