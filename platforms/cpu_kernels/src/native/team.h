// The thread team of the process: distributes an operation over the cores.
//
// A region is a function that the caller and every worker that joins in time run together. Each
// thread claims pieces of a common range: first of its own contiguous share, so that memory is read
// in streams, then of other shares. A worker may join only while the region is open, and the caller
// never waits for a worker that has not joined: a descheduled thread causes a delay only in the
// middle of a piece. A worker that was descheduled then runs and pauses in turns: otherwise the
// system would preempt it again within a piece. Regions of several callers do not mix: a caller
// that finds the team busy (also a region inside a region) does all the work alone. Every thread
// computes in the default floating-point mode.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "dispatch.h"
#include "failure.h"
#include "float_mode.h"

namespace dk {

constexpr int kMaxThreads = 64;

// Threads of the team, including the caller.
int num_threads();

// Run fn(body) on the caller, thread 0, and on the workers that join, maybe several times; return
// when all finished.
// Each has an index in [0, threads), also if the team grows meanwhile. fn returns the number of
// pieces that it did.
using RegionFunction = int64_t (*)(void* body, int thread);
void run_region(RegionFunction fn, void* body, int threads);

// Whether a worker leaves the region before its next piece, because it shares its core.
bool must_leave(int thread);

// Memory of the calling thread, aligned to 64 bytes, uninitialized, valid until its next call with
// the same slot, freed with the thread. Throws NoMemory. Memory of an operation's caller may be
// shared with workers during a region; within a region use another slot.
enum ScratchSlot { kOperationScratch, kRegionScratch, kOtherScratch, kNumScratchSlots };
char* scratch(ScratchSlot slot, size_t num_bytes);

// The pieces of [0, num_items) that are left: a counter per thread on a separate cache line.
class Pieces {
 public:
  DK_INLINE Pieces(int64_t num_items, int64_t grain, int threads)
      : threads_(threads), grain_(grain) {
    for (int t = 0; t < threads; ++t) {
      shares_[t].next.store(num_items * t / threads, std::memory_order_relaxed);
      shares_[t].end = num_items * (t + 1) / threads;
    }
  }

  // Claim the next piece for `thread`; false if nothing is left. Uses no floating point.
  DK_INLINE bool claim(int thread, int64_t& begin, int64_t& end) {
    for (int k = 0; k < threads_; ++k) {
      Share& share = shares_[thread + k < threads_ ? thread + k : thread + k - threads_];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      begin = share.next.fetch_add(grain_, std::memory_order_relaxed);
      if (begin >= share.end) continue;
      end = begin + grain_ < share.end ? begin + grain_ : share.end;
      return true;
    }
    return false;
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };
  int threads_;
  int64_t grain_;
  Share shares_[kMaxThreads];
};

// Run body(next) on each thread that joins, again if the thread has paused; `next(begin, end)`
// claims its pieces of [0, num_items), at most `grain` items each, until it returns false. For
// bodies with a setup step per thread. Throws NoMemory if a thread did: then the others have done
// its pieces or not.
template <class F>
void parallel_ranges(int64_t num_items, int64_t grain, F body) {
  const int threads = num_threads();
  if (num_items <= 0) return;
  struct Region {
    Pieces pieces;
    F& body;
    std::atomic<size_t> missing_bytes{0};  // of a thread without memory
  } region{Pieces(num_items, grain, threads), body, {}};
  const auto enter = [](void* opaque, int thread) {
    Region& shared = *static_cast<Region*>(opaque);
    int64_t num_pieces = 0;
    try {
      shared.body([&shared, &num_pieces, thread](int64_t& begin, int64_t& end) {
        const bool is_claimed = !must_leave(thread) && shared.pieces.claim(thread, begin, end);
        num_pieces += is_claimed;
        return is_claimed;
      });
    } catch (const NoMemory& failure) {
      shared.missing_bytes.store(failure.num_bytes, std::memory_order_relaxed);
    }
    return num_pieces;
  };
  const DefaultFloatMode mode;
  if (threads == 1 || num_items <= grain) {
    enter(&region, 0);
  } else {
    run_region(enter, &region, threads);
  }
  if (const size_t missing_bytes = region.missing_bytes.load()) throw NoMemory{missing_bytes};
}

// Run body(begin, end) over pieces that cover [0, num_items) exactly once, `grain` items at most
// each.
template <class F>
void parallel_for(int64_t num_items, int64_t grain, F body) {
  parallel_ranges(num_items, grain, [&body](auto&& next) {
    int64_t begin, end;
    while (next(begin, end)) body(begin, end);
  });
}

}  // namespace dk
