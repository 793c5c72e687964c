"""The compute threads of torch and of the native kernels.

choice   the default number of threads
supply   starts the threads, or reports that the system permits no more
sharing  warns if two engines of a process have different numbers of threads
"""
