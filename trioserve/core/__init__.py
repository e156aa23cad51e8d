"""The engine core without its I/O: which tokens are computed in which step, and in which KV blocks.

    EngineCore            one step at a time: schedule -> execute (the injected runner) -> finish
    └─ Scheduler          the requests; who computes how many tokens in the next step
       ├─ SchedulingPolicy   who waits before whom, who gives way when blocks run out
       └─ KVCacheManager     block tables
          ├─ BlockPool          who holds which block, and which is given out next
          └─ PrefixCache        finds blocks whose content is known already

Plain synchronous Python: no torch, no trio, no thread and no socket of its own.
"""
