// The thread team: every item is processed exactly once, for all sizes, callers and cores.
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "cases.h"
#include "team.h"

#if DK_X86
#include <immintrin.h>
#endif

namespace {

// Run one loop of random size; every item must be processed once, in pieces of at most `grain`.
void run_loop(cases::Random& random) {
  const int64_t num_items = random.coin() ? random.below(40) : random.below(5000);
  const int64_t grain = random.between(1, 9);
  std::vector<std::atomic<int>> done(num_items);
  std::atomic<bool> fits{true};
  dk::parallel_for(num_items, grain, [&](int64_t begin, int64_t end) {
    if (begin >= end || end - begin > grain) fits = false;
    for (int64_t i = begin; i < end; ++i) done[i].fetch_add(1, std::memory_order_relaxed);
  });
  cases::check(fits, "a piece is empty or larger than the grain");
  for (const auto& times : done) cases::check(times == 1, "an item was not done exactly once");
}

void run_loops(cases::Random& random, int64_t count) {
  for (int64_t i = 0; i < count; ++i) run_loop(random);
}

// A process that keeps a core busy while this object exists: any core, or `cpu`. It ends with this
// process, also if a check or a signal ends that.
class Hog {
 public:
  explicit Hog(int cpu = -1) : pid_(fork()) {
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      cpu_set_t one;
      CPU_ZERO(&one);
      if (cpu >= 0) CPU_SET(cpu, &one);
      if (cpu >= 0) sched_setaffinity(0, sizeof one, &one);
      for (volatile uint64_t n = 0;;) n = n + 1;
    }
  }
  ~Hog() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

// Restrict this thread, and the workers that it starts, to one core while this object exists.
class OneCore {
 public:
  OneCore() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); ++cpu) {
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &one);
    }
    sched_setaffinity(0, sizeof one, &one);
    restart();
  }
  ~OneCore() {
    sched_setaffinity(0, sizeof before_, &before_);
    restart();
  }

 private:
  // Workers inherit the affinity mask of the thread that starts them.
  static void restart() {
    const int64_t threads = dk_num_threads();
    dk_set_num_threads(threads == 1 ? 2 : 1);
    dk_set_num_threads(threads);
  }
  cpu_set_t before_;
};

}  // namespace

DK_CASE_ONCE(team_items) {
  dk_set_num_threads(random.between(1, 9));
  run_loops(random, 20);
}

DK_CASE_ONCE(team_ranges) {
  dk_set_num_threads(random.between(1, 5));
  const int64_t num_items = random.below(300);
  std::atomic<int64_t> sum{0};
  dk::parallel_ranges(num_items, 2, [&](auto&& next) {
    int64_t begin, end, mine = 0;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) mine += i;
    }
    sum += mine;
  });
  cases::check(sum == num_items * (num_items - 1) / 2, "the sum of the ranges");
}

DK_CASE_ONCE(team_nested) {
  std::atomic<int64_t> sum{0};
  dk::parallel_for(7, 1, [&](int64_t outer, int64_t) {
    const auto add = [&](int64_t begin, int64_t end) { sum += (end - begin) * (outer + 1); };
    dk::parallel_for(11, 2, add);
  });
  cases::check(sum == 11 * 28, "a region inside a region");
}

DK_CASE_ONCE(team_callers) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([seed = random.bits()] {
      cases::Random own(seed);
      run_loops(own, 20);
    });
  }
  dk_set_num_threads(random.between(1, 4));  // while they run
  for (std::thread& caller : callers) caller.join();
}

DK_CASE_ONCE(team_starved) {
  const OneCore one_core;
  run_loops(random, 10);
}

DK_CASE_ONCE(team_beside_a_hog) {
  const Hog hog;
  run_loops(random, 30);
}

#ifndef __SANITIZE_THREAD__  // which does not support a fork that starts threads
DK_CASE_ONCE(team_after_a_fork) {
  run_loops(random, 2);
  const pid_t child = fork();
  if (child == 0) {
    run_loops(random, 5);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  cases::check(status == 0, "a region in the child of a fork");
  run_loops(random, 2);
}
#endif

DK_CASE_ONCE(team_parked) {
  run_loops(random, 1);
  usleep(1000);  // long enough for workers to park
  run_loops(random, 1);
}

DK_CASE_ONCE(team_grown) {
  // The team may grow between the count of a caller's threads and its region.
  dk_set_num_threads(8);
  std::atomic<int> highest{0}, others{0};
  std::atomic<int>* counts[] = {&highest, &others};
  const auto enter = [](void* body, int thread) -> int64_t {
    auto** const seen = static_cast<std::atomic<int>**>(body);
    if (thread > *seen[0]) seen[0]->store(thread);
    if (thread) ++*seen[1];
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (thread == 0 && !*seen[1] && std::chrono::steady_clock::now() < until) usleep(100);
    return 1;
  };
  for (int i = 0; i < 5; ++i) dk::run_region(enter, counts, 2);
  cases::check(highest < 2, "a worker without a share was in the region");
}

namespace {

// Run `num_pieces` that sleep; a worker's first piece sleeps `first_us`. Returns how many pieces
// workers did.
int64_t count_pieces(int64_t num_pieces, int64_t piece_us, int64_t first_us) {
  std::atomic<bool> is_taken{false};
  std::atomic<int64_t> pieces{0};
  const auto caller = std::this_thread::get_id();
  dk::parallel_ranges(num_pieces, 1, [&](auto&& next) {
    int64_t begin, end;
    const bool is_worker = std::this_thread::get_id() != caller;
    while (next(begin, end)) {
      pieces += is_worker;
      usleep(is_worker && !is_taken.exchange(true) ? first_us : piece_us);
    }
  });
  return pieces;
}

}  // namespace

namespace {

// Whether a worker joins a region right after one in which a worker was late by `late_us`.
// The machine may be busy, so one of several attempts is enough; each begins after any pause.
bool joins_after(int64_t num_pieces, int64_t piece_us, int64_t late_us, int64_t next_pieces) {
  for (int attempt = 0; attempt < 10; ++attempt) {
    usleep(25000);
    count_pieces(num_pieces, piece_us, late_us);
    if (count_pieces(next_pieces, 400, 400)) return true;
  }
  return false;
}

}  // namespace

DK_CASE_ONCE(team_long_pieces) {
  dk_set_num_threads(2);
  cases::check(joins_after(2, 3000, 9000, 20), "long pieces were taken for a busy core");
}

DK_CASE_ONCE(team_late_worker) {
  dk_set_num_threads(3);
  cases::check(joins_after(60, 200, 40000, 20), "one late worker stopped the others");
}

DK_CASE_ONCE(team_joins_midway) {
  dk_set_num_threads(2);
  cases::check(joins_after(60, 200, 30000, 400), "a worker did not join after its pause");
}

DK_CASE_ONCE(team_continues_after_pauses) {
  // Of a long region, a worker that shares its core does more than the pieces of its first turn.
  dk_set_num_threads(2);
  int num_late = 0, num_returned = 0;
  for (int attempt = 0; attempt < 20 && num_late < 3; ++attempt) {
    usleep(25000);
    if (count_pieces(60, 200, 60000) != 1) continue;  // the worker was not late
    ++num_late;
    num_returned += count_pieces(300, 400, 400) >= 40;
  }
  cases::check(2 * num_returned >= num_late, "a worker did not return after its pause");
}

DK_CASE_ONCE(team_leaves_core_of_caller) {
  // A worker that is put on the caller's core runs its next piece on another core, although these
  // are busy. It may still run anywhere, but a worker with one core stays there.
  cpu_set_t before, one;
  sched_getaffinity(0, sizeof before, &before);
  if (CPU_COUNT(&before) < 2) return;
  dk_set_num_threads(1);
  dk_set_num_threads(2);
  std::vector<std::unique_ptr<Hog>> hogs;
  const int home = sched_getcpu();
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (cpu != home && CPU_ISSET(cpu, &before)) hogs.push_back(std::make_unique<Hog>(cpu));
  }
  CPU_ZERO(&one);
  CPU_SET(home, &one);
  const auto caller = std::this_thread::get_id();
  // Run pieces until a worker did one, which is called with a reference to the result.
  const auto until_joined = [&](auto&& piece) {
    std::atomic<int> result{-1};
    for (int i = 0; i < 100 && result < 0; ++i) {
      dk::parallel_for(40, 1, [&](int64_t, int64_t) {
        if (std::this_thread::get_id() != caller && result < 0) piece(result);
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
        while (result < 0 && std::chrono::steady_clock::now() < until) {
        }
      });
    }
    return result.load();
  };
  const auto has_cores = [](const cpu_set_t& cpus) {
    cpu_set_t own;
    return sched_getaffinity(0, sizeof own, &own) == 0 && CPU_EQUAL(&own, &cpus);
  };
  int num_left = 0;
  std::atomic<bool> is_kept{true};
  until_joined([](std::atomic<int>& result) { result = 0; });
  sched_setaffinity(0, sizeof one, &one);
  for (int attempt = 0; attempt < 8; ++attempt) {
    until_joined([&](std::atomic<int>& result) {
      sched_setaffinity(0, sizeof one, &one);
      sched_setaffinity(0, sizeof before, &before);
      result = home;
    });
    usleep(12000);  // a worker moves at most every 10 ms
    num_left += until_joined([&](std::atomic<int>& result) {
      is_kept = is_kept && has_cores(before);
      result = sched_getcpu();
    }) != home;
  }
  until_joined([&](std::atomic<int>& result) {
    sched_setaffinity(0, sizeof one, &one);
    result = home;
  });
  usleep(12000);
  until_joined([&](std::atomic<int>& result) {
    is_kept = is_kept && has_cores(one);
    result = home;
  });
  sched_setaffinity(0, sizeof before, &before);
  dk_set_num_threads(1);
  cases::check(num_left >= 6, "a worker stayed on the caller's core");
  cases::check(is_kept, "a worker has another affinity mask");
}

DK_CASE_ONCE(team_signals) {
  dk_set_num_threads(3);
  std::atomic<bool> is_right{true};
  const auto caller = std::this_thread::get_id();
  dk::parallel_for(40, 1, [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == caller) {
      usleep(200);
      return;
    }
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
      if (sigismember(&blocked, own)) is_right = false;
    }
    is_right = is_right && sigismember(&blocked, SIGTERM) && sigismember(&blocked, SIGINT);
  });
  cases::check(is_right, "the signals that a worker blocks");
}

#if DK_X86
DK_CASE_ONCE(team_float_mode) {
  constexpr unsigned kFlush = 0x8040, kControl = ~0x3fu;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlush);
  dk_set_num_threads(1);
  dk_set_num_threads(random.between(1, 4));  // workers inherit the mode
  std::atomic<int64_t> num_flushed{0};
  volatile float tiny = 1e-38f;
  dk::parallel_for(40, 1, [&](int64_t, int64_t) {
    usleep(50);
    num_flushed += tiny * 0.125f == 0.0f;
  });
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  cases::check(num_flushed == 0, "the host's floating-point mode changed a result");
  cases::check((after & kControl) == ((before | kFlush) & kControl), "the mode was not restored");
}
#endif

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // whose allocators end first
DK_CASE_ONCE(team_without_memory) {
  constexpr size_t kTooMany = SIZE_MAX / 4;
  size_t missing = 0;
  try {
    dk::scratch(dk::kOperationScratch, kTooMany);
  } catch (const dk::NoMemory& failure) {
    missing = failure.num_bytes;
  }
  cases::check(missing >= kTooMany, "scratch memory without an error");
  missing = 0;
  try {
    dk::parallel_for(40, 1, [&](int64_t begin, int64_t) {
      if (begin == 20) dk::scratch(dk::kOperationScratch, kTooMany);
    });
  } catch (const dk::NoMemory& failure) {
    missing = failure.num_bytes;
  }
  cases::check(missing >= kTooMany, "the error of a piece was lost");
}
#endif
