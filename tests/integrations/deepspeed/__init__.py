"""DeepSpeed ZeRO-3 with our optimizer: two gloo ranks on processors."""
