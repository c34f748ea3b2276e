// DeepSpeed's Adam as one file: torch's headers, which take most of the time, are read once.
#include "../adam/cpu_adam.cpp"
#include "../adam/cpu_adam_impl.cpp"
