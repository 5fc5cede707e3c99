// Two members walk a loop in two jobs; one stays in the middle of its first chunk until both jobs are over. Prints for how
// many items each job published exactly once.
#include <algorithm>
#include <cstdio>

#include "team.hpp"

int main() {
  constexpr int n = 40;
  std::atomic<int> inside{0}, published[2][n] = {};
  std::atomic<bool> released{false};
  auto body = [&](int member, const tf::Counts& counts, tf::Team::Walk& walk) {
    auto compute = [&](int, int) {
      if (member == 1 && !inside.exchange(1))
        while (!released.load()) std::this_thread::yield();
      else
        while (!inside.load()) std::this_thread::yield();
    };
    walk.loop(tf::kQkv, n, n, compute, [&](int item, int) { published[counts.rows][item]++; });
  };
  {
    tf::Team team(2, n, body);
    for (int job = 0; job < 2; job++) team.run({job, 0, 0, 0}, nullptr);
    released.store(true);
  }
  for (auto& job : published) std::printf("%d ", int(std::count(job, job + n, 1)));
}
