// The thread team. One word contains the region's number, whether it is open, and how many workers
// are in it, so that joining is one compare-and-swap that fails once the region is closed.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#if DK_X86
#include <immintrin.h>
#endif

namespace dk {
namespace {

constexpr uint64_t kOpen = 1 << 15;         // below: workers inside; above: the region's number
constexpr uint64_t kInside = kOpen - 1;
constexpr int kNumberShift = 16;
constexpr int kWorkerSpins = 2000;          // about 25 us, then the worker parks
constexpr int kCallerSpins = 400;           // then the caller yields its core to the last worker
constexpr int64_t kStallNs = 200'000;       // a worker that is longer late may be descheduled,
constexpr int64_t kStallPieces = 5;         // if it is also longer than this many pieces take;
constexpr int64_t kSharedNs = 200'000'000;  // then it shares its core, for this long:
constexpr int64_t kMarginNs = 250'000;      // so long before the tick that would preempt it,
constexpr int64_t kPauseNs = 300'000;       // it pauses, and the other program has its turn
constexpr int64_t kMinRunNs = 500'000;      // a tick earlier than this after a pause is ignored
constexpr int64_t kAbsenceNs = 2'000'000;   // between two pieces: the other program ran
constexpr int64_t kMoveNs = 10'000'000;     // between two attempts to leave the caller's core

void relax() {
#if DK_X86
  _mm_pause();
#else
  asm volatile("" ::: "memory");
#endif
}

int64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t{};
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

int64_t read_tick_period_ns() {
  timespec t;
  const bool is_known = clock_getres(CLOCK_MONOTONIC_COARSE, &t) == 0 && !t.tv_sec;
  return is_known && t.tv_nsec >= 500'000 && t.tv_nsec <= 20'000'000 ? t.tv_nsec : 1'000'000;
}

// Nanoseconds between two ticks of the system's timer, which update the coarse clock. Read while
// the library is loaded: a fork may happen while a worker initializes a variable of a function.
const int64_t tick_period_ns = read_tick_period_ns();

// Sleep while `word` has the value.
void park(std::atomic<uint32_t>& word, uint32_t while_it_is) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, while_it_is, nullptr, nullptr, 0);
}

void unpark_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1 << 20, nullptr, nullptr, 0);
}

// When a worker last left a region whose caller waited, and until when it shares its core with
// another program. The system preempts at ticks of its timer. Such a worker pauses before a tick,
// so that it is not preempted within a piece. Only the worker itself uses the other fields.
struct alignas(64) Worker {
  std::atomic<int64_t> left_ns{0};
  std::atomic<int64_t> shares_until_ns{0};
  int64_t seen_ns = 0;
  int64_t pauses_at_ns = 0;
  int64_t tick_offset_ns = INT64_MAX;  // lowest difference to the coarse clock: that of a tick
  int64_t moved_ns = 0;
};

// Constant-initialized and never destroyed: workers may outlive static destructors.
struct Team {
  alignas(64) std::atomic<uint64_t> state{0};
  alignas(64) std::atomic<uint32_t> wake{0};
  std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> caller_waits{0};
  alignas(64) std::atomic<bool> busy{false};  // locked to run a region or change the team
  std::atomic<bool> quit{false};
  std::atomic<int> wanted{1};
  std::atomic<int> caller_cpu{-1};  // when the region began
  RegionFunction fn = nullptr;
  void* body = nullptr;
  int region_threads = 1;
  int num_workers = 0;
  pthread_t handles[kMaxThreads];
  Worker workers[kMaxThreads];  // by thread; 0 is the caller
  bool has_cpus = false;        // of the workers
  cpu_set_t cpus;
};
Team team;

bool joinable(uint64_t state, uint64_t last) {
  return (state & kOpen) && (state >> kNumberShift) != last;
}

void leave_region(Worker& self) {
  if (team.caller_waits.load()) self.left_ns.store(now_ns(), std::memory_order_relaxed);
  const uint64_t left = team.state.fetch_sub(1) - 1;
  if ((left & kInside) || (left & kOpen) || !team.caller_waits.load()) return;
  team.caller_waits.store(0);
  unpark_all(team.caller_waits);
}

void park_worker(uint64_t last) {
  const uint32_t seen = team.wake.load();
  team.sleepers.fetch_add(1);
  // A region opened before `sleepers` increased is visible here; one opened later sets `wake`.
  if (!joinable(team.state.load(), last) && !team.quit.load()) park(team.wake, seen);
  team.sleepers.fetch_sub(1);
}

// A worker that shares its core runs until shortly before the tick that would preempt it.
void begin_run(Worker& self, int64_t now) {
  const int64_t coarse_ns = now_ns(CLOCK_MONOTONIC_COARSE);
  self.seen_ns = now;
  self.tick_offset_ns = std::min(self.tick_offset_ns, now - coarse_ns);
  const int64_t tick_ns = coarse_ns + self.tick_offset_ns + tick_period_ns;
  const int64_t early_ns = std::max<int64_t>(0, now + kMinRunNs - tick_ns);
  const int64_t num_ignored = (early_ns + tick_period_ns - 1) / tick_period_ns;
  self.pauses_at_ns = tick_ns + num_ignored * tick_period_ns - kMarginNs;
}

// Whether a worker that shares its core has run for long enough. Ends the sharing in time.
bool must_pause(Worker& self) {
  const int64_t until_ns = self.shares_until_ns.load(std::memory_order_relaxed);
  if (!until_ns) return false;
  const int64_t now = now_ns();
  if (now >= until_ns) {
    self.shares_until_ns.store(0, std::memory_order_relaxed);
    self.tick_offset_ns = INT64_MAX;
    return false;
  }
  if (now - self.seen_ns > kAbsenceNs) begin_run(self, now);
  self.seen_ns = now;
  return now >= self.pauses_at_ns;
}

// Sleep. A worker that is late afterwards still shares its core.
void pause_worker(Worker& self) {
  const timespec pause{0, kPauseNs};
  const int64_t began_ns = now_ns();
  nanosleep(&pause, nullptr);
  const int64_t now = now_ns();
  if (now - began_ns > kPauseNs + kStallNs) self.shares_until_ns.store(now + kSharedNs);
  begin_run(self, now);
}

// Leave the caller's core, where both would have half of the time: beside another program the
// system wakes workers there, and moves them only much later. Returns whether the worker moved.
bool leave_core_of_caller(Worker& self) {
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  if (cpu != team.caller_cpu.load(std::memory_order_relaxed)) return false;
  const int64_t now = now_ns();
  if (now - self.moved_ns < kMoveNs) return false;
  self.moved_ns = now;
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  others = allowed;
  CPU_CLR(cpu, &others);
  if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others) != 0) return false;
  sched_setaffinity(0, sizeof allowed, &allowed);  // it moved; it may run anywhere from now on
  return true;
}

void* run_worker(void* opaque) {
  const int thread = static_cast<int>(reinterpret_cast<intptr_t>(opaque));
  const DefaultFloatMode mode;
  Worker& self = team.workers[thread];
  self.left_ns.store(0);
  self.shares_until_ns.store(0);
  uint64_t last = 0;
  int idle = 0;
  while (!team.quit.load(std::memory_order_relaxed)) {
    uint64_t state = team.state.load(std::memory_order_acquire);
    if (joinable(state, last)) {
      if (must_pause(self)) {
        pause_worker(self);
        continue;
      }
      if (leave_core_of_caller(self)) continue;
      if (!team.state.compare_exchange_weak(state, state + 1)) continue;
      last = state >> kNumberShift;
      // The team may have grown since the caller counted its threads.
      if (thread < team.region_threads) team.fn(team.body, thread);
      leave_region(self);
      if (must_pause(self)) last = 0;  // it may have left pieces: it joins again after the pause
      idle = 0;
    } else if (++idle < kWorkerSpins) {
      relax();
    } else {
      park_worker(last);
      if (self.shares_until_ns.load(std::memory_order_relaxed)) begin_run(self, now_ns());
      idle = 0;
    }
  }
  return nullptr;
}

void stop_workers() {
  team.quit.store(true);
  team.wake.fetch_add(1);
  unpark_all(team.wake);
  for (int t = 0; t < team.num_workers; ++t) pthread_join(team.handles[t], nullptr);
  team.num_workers = 0;
  team.quit.store(false);
}

// In the child of a fork only the forking thread exists: reset the team; workers are started on
// first use.
void forget_workers() {
  team.state.store(0);
  team.sleepers.store(0);
  team.caller_waits.store(0);
  team.quit.store(false);
  team.num_workers = 0;
  team.busy.store(false);
}

bool acquire_team() { return !team.busy.exchange(true, std::memory_order_acquire); }
void release_team() { team.busy.store(false, std::memory_order_release); }

// Start missing workers. Signals are handled by threads of the host program, except those that an
// instruction of the worker raises: the host's handlers report where that was.
void start_workers() {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, own);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
#ifdef __GLIBC__
  if (team.has_cpus) pthread_attr_setaffinity_np(&attributes, sizeof team.cpus, &team.cpus);
#endif
  while (team.num_workers + 1 < team.wanted.load()) {
    const intptr_t thread = team.num_workers + 1;
    pthread_t* const handle = &team.handles[team.num_workers];
    void* const index = reinterpret_cast<void*>(thread);
    if (pthread_create(handle, &attributes, run_worker, index) != 0) {
      fprintf(stderr, "dovetail: the system has no thread for worker %d of the native kernels, "
              "which continue on %d threads\n", static_cast<int>(thread), team.num_workers + 1);
      team.wanted.store(team.num_workers + 1);
      break;
    }
    ++team.num_workers;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Wait until no worker is inside the closed region. A worker that is late for longer than pieces
// take was preempted within one: it shares its core with another program for a while.
void wait_for_workers(int64_t piece_ns) {
  int spins = 0;
  int64_t began_ns = 0;
  while (team.state.load(std::memory_order_acquire) & kInside) {
    if (++spins < kCallerSpins) {
      relax();
      continue;
    }
    if (!began_ns) began_ns = now_ns();
    team.caller_waits.store(1);
    if (team.state.load() & kInside) park(team.caller_waits, 1);
    team.caller_waits.store(0);
  }
  if (!began_ns) return;
  const int64_t patience_ns = std::max(kStallNs, kStallPieces * piece_ns);
  for (int t = 1; t <= team.num_workers; ++t) {
    const int64_t left_ns = team.workers[t].left_ns.load(std::memory_order_relaxed);
    const int64_t late_ns = left_ns - began_ns;
    if (late_ns < patience_ns) continue;
    team.workers[t].shares_until_ns.store(left_ns + kSharedNs, std::memory_order_relaxed);
  }
}

__attribute__((constructor)) void prepare_for_forks() {
  pthread_atfork(nullptr, nullptr, forget_workers);
}

// Idle workers are stopped with the library; a region that is still running is left to the exit.
__attribute__((destructor)) void end_team() {
  if (acquire_team()) stop_workers();
}

#ifdef __SANITIZE_ADDRESS__
constexpr bool kExactScratch = true;  // so that sanitizers detect overruns
#else
constexpr bool kExactScratch = false;
#endif

struct Scratch {
  char* memory[kNumScratchSlots] = {};
  size_t sizes[kNumScratchSlots] = {};
  ~Scratch() {
    for (char* each : memory) free(each);
  }
};
thread_local Scratch thread_scratch;

}  // namespace

bool must_leave(int thread) { return thread && must_pause(team.workers[thread]); }

int num_threads() { return team.wanted.load(std::memory_order_relaxed); }

void run_region(RegionFunction fn, void* body, int threads) {
  if (threads == 1 || num_threads() == 1 || !acquire_team()) {
    fn(body, 0);
    return;
  }
  if (team.num_workers + 1 < team.wanted.load()) start_workers();
  team.fn = fn;
  team.body = body;
  team.region_threads = threads;
  team.caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
  const uint64_t number = (team.state.load(std::memory_order_relaxed) >> kNumberShift) + 1;
  team.state.store(number << kNumberShift | kOpen);
  if (team.sleepers.load()) {
    team.wake.fetch_add(1);
    unpark_all(team.wake);
  }
  const int64_t began_ns = now_ns();
  const int64_t num_pieces = fn(body, 0);
  const int64_t mine_ns = now_ns() - began_ns;
  team.state.fetch_and(~kOpen);
  wait_for_workers(mine_ns / std::max<int64_t>(1, num_pieces));
  release_team();
}

char* scratch(ScratchSlot slot, size_t num_bytes) {
  char*& memory = thread_scratch.memory[slot];
  size_t& size = thread_scratch.sizes[slot];
  if (num_bytes <= size && !kExactScratch) return memory;
  free(memory);
  memory = nullptr;
  size = 0;
  const size_t wanted = kExactScratch ? num_bytes : num_bytes + num_bytes / 2 + 4096;
  void* fresh = nullptr;
  if (posix_memalign(&fresh, 64, wanted) != 0) throw NoMemory{wanted};
  size = wanted;
  return memory = static_cast<char*>(fresh);
}

}  // namespace dk

void dk_set_num_threads(int64_t n) {
  const int wanted = static_cast<int>(std::clamp<int64_t>(n, 1, dk::kMaxThreads));
  while (!dk::acquire_team()) sched_yield();
  if (wanted != dk::team.wanted.load()) {
    dk::stop_workers();
    dk::team.wanted.store(wanted);
    dk::team.has_cpus = sched_getaffinity(0, sizeof dk::team.cpus, &dk::team.cpus) == 0;
  }
  dk::release_team();
}

int64_t dk_num_threads(void) { return dk::num_threads(); }
