// The whole standard library stands before the text that is compiled: see metal/stdlib.h.
