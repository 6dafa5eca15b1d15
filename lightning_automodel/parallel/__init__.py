"""How a model becomes parallel: ``stages`` is the order, the modules beside it are the stages."""
