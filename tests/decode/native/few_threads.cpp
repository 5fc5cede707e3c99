// Asks for more threads than the address space holds. Prints whether that was refused with an exception.
#include <sys/resource.h>

#include <cstdio>
#include <exception>

#include "team.hpp"

int main() {
  const rlimit limit{256u << 20, 256u << 20};
  if (setrlimit(RLIMIT_AS, &limit)) return 1;
  try {
    tf::Team team(1000, 1, [](int, const tf::Counts&, tf::Team::Walk&) {});
    std::printf("built");
  } catch (const std::exception&) {
    std::printf("refused");
  }
}
