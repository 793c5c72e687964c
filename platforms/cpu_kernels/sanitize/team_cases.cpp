// The thread team: every item is processed exactly once, for all sizes, callers and cores.
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cases.h"
#include "team.h"

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

// A process that keeps a core busy while this object exists.
class Hog {
 public:
  Hog() : pid_(fork()) {
    if (pid_ == 0) {
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

DK_CASE(team_items) {
  dk_set_num_threads(random.between(1, 9));
  run_loops(random, 20);
}

DK_CASE(team_ranges) {
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

DK_CASE(team_nested) {
  std::atomic<int64_t> sum{0};
  dk::parallel_for(7, 1, [&](int64_t outer, int64_t) {
    const auto add = [&](int64_t begin, int64_t end) { sum += (end - begin) * (outer + 1); };
    dk::parallel_for(11, 2, add);
  });
  cases::check(sum == 11 * 28, "a region inside a region");
}

DK_CASE(team_callers) {
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

DK_CASE(team_starved) {
  const OneCore one_core;
  run_loops(random, 10);
}

DK_CASE(team_beside_a_hog) {
  const Hog hog;
  run_loops(random, 30);
}

#ifndef __SANITIZE_THREAD__  // which does not support a fork that starts threads
DK_CASE(team_after_a_fork) {
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

DK_CASE(team_parked) {
  run_loops(random, 1);
  usleep(1000);  // long enough for workers to park
  run_loops(random, 1);
}
