"""The last stage under FSDP2: ``sharding`` chooses what is sharded how, the modules beside it do it and watch it."""
