// Runs every case at every level, and those of code without levels once: driver [turns [part of a
// name]]. Exits with 1 on a wrong result and is killed by a signal if a turn hangs; the sanitizers
// stop it too.
#include <unistd.h>

#include "cases.h"

namespace cases {
static Case* first_case = nullptr;
Case::Case(const char* name_, void (*run_)(Random&), bool runs_once_)
    : name(name_), run(run_), runs_once(runs_once_), next(first_case) {
  first_case = this;
}
}  // namespace cases

int main(int argc, char** argv) {
  const int64_t turns = argc > 1 ? atoll(argv[1]) : 40;
  const char* const part = argc > 2 ? argv[2] : "";
  for (int64_t level = 0; level <= dk_highest_level(); ++level) {
    if (!dk_supports_level(level)) continue;
    cases::check(dk_set_level(level) == level, "the level was not taken");
    for (const cases::Case* one = cases::first_case; one; one = one->next) {
      if (!strstr(one->name, part) || (one->runs_once && level > DK_PORTABLE)) continue;
      uint64_t seed = static_cast<uint64_t>(one->name[0]);
      for (const char* letter = one->name; *letter; ++letter) seed = seed * 131 + *letter;
      for (int64_t turn = 0; turn < turns; ++turn) {
        alarm(120);
        dk_set_num_threads(turn % 2 ? 3 : 1);
        cases::Random random(seed + turn);
        one->run(random);
      }
      printf("level %lld: %s, %lld turns\n", (long long)level, one->name, (long long)turns);
      fflush(stdout);
    }
  }
  return 0;
}
