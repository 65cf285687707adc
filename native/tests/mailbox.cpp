// The mailbox in memory of exactly its size: damaged headers are refused, and threads that are buried while they live
// neither lose nor double a reply. The Python tests check each transition, and kill real processes.
#include "mailbox.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "h3/access_probe.hpp"
#include "h3/mailbox.hpp"

namespace {

using h3::Mailbox;
using h3::MailboxBytes;
using h3::MailboxCaller;
using h3::MailboxGeometry;
using h3::MailboxRequest;
using h3::MailboxResult;
using h3::MailboxWorker;
using h3::Member;

constexpr MailboxGeometry kGeometry{16, 40, 24, 3, 3};
constexpr std::uint64_t kForever = ~std::uint64_t{0} >> 1;

struct Room {
  explicit Room(std::size_t size) : memory(std::aligned_alloc(64, size)) {}
  ~Room() { std::free(memory); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  void* memory;
};

bool is_refused(void* memory, std::size_t size) {
  try {
    Mailbox::attach(memory, size);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void check_header(const Expect& expect) {
  const std::size_t size = kGeometry.size_bytes();
  const Room room(size);
  Mailbox::create(room.memory, size, kGeometry);
  expect(!is_refused(room.memory, size), "a whole mailbox is attached to");
  expect(is_refused(room.memory, size - 64), "a mailbox that is cut off is refused");
  for (int at = 0; at < 44; ++at) {  // magic, version, geometry, size and checksum, without padding
    char& byte = static_cast<char*>(room.memory)[at];
    byte = static_cast<char>(byte ^ 0x10);
    expect(is_refused(room.memory, size), "a damaged header is refused");
    byte = static_cast<char>(byte ^ 0x10);
  }
}

std::uint64_t number_of(std::span<const char> bytes) {
  std::uint64_t number = 0;
  std::memcpy(&number, bytes.data(), std::min(bytes.size(), sizeof number));
  return number;
}

// Workers serve in lives of random length and are buried by another thread while they work. Each caller sends numbers
// and wants three times each back, once.
struct Crowd {
  explicit Crowd(const Expect& expect)
      : expect(expect),
        room(kGeometry.size_bytes()),
        mailbox(Mailbox::create(room.memory, kGeometry.size_bytes(), kGeometry)) {}

  void serve(int seed) {
    std::mt19937 generator(static_cast<unsigned>(seed));
    MailboxRequest request{};
    while (!is_over) {
      Member member{};
      if (!mailbox.register_worker(member)) continue;
      MailboxWorker worker(mailbox, member, generator() % 2 == 0 ? 0 : 2000);
      alive[member.id] = std::uint64_t{member.epoch} << 1 | 1;
      MailboxResult result = MailboxResult::kTimeout;
      while (!is_over && result != MailboxResult::kBuried) {
        result = worker.take(request, generator() % 8 == 0 ? 0 : kForever);
        if (result != MailboxResult::kOk) continue;
        const std::uint64_t reply[2] = {number_of(request.bytes.view()) * 3, generator()};
        const std::span<const char> bytes(reinterpret_cast<const char*>(reply), 8 + generator() % 9);
        if (worker.reply(request, bytes) == MailboxResult::kOk) {
          ++replies;
          expect(worker.reply(request, bytes) != MailboxResult::kOk, "a second reply is refused");
        }
      }
      if (result != MailboxResult::kBuried) mailbox.bury_worker(member);
    }
  }

  void bury() {
    std::mt19937 generator(5);
    while (!is_over) {
      const std::uint32_t id = generator() % kGeometry.workers;
      const std::uint64_t seen = alive[id];
      if ((seen & 1) != 0) mailbox.bury_worker({id, static_cast<std::uint32_t>(seen >> 1)});
      std::this_thread::sleep_for(std::chrono::microseconds(generator() % 500));
    }
  }

  void call(std::uint64_t first, int rounds) {
    std::mt19937 generator(static_cast<unsigned>(first));
    Member member{};
    expect(mailbox.register_caller(member), "a place for each caller");
    MailboxCaller caller(mailbox, member, 2000);
    MailboxBytes reply;
    for (int round = 0; round < rounds; ++round) {
      std::uint64_t numbers[4];
      std::vector<std::span<const char>> requests;
      for (std::uint64_t& number : numbers) {
        number = first++;
        requests.emplace_back(reinterpret_cast<const char*>(&number), sizeof number);
      }
      std::vector<std::uint64_t> tickets;
      caller.post(requests, kForever, tickets);
      for (std::size_t i = 0; i < tickets.size(); ++i) {
        if (generator() % 16 == 0 && caller.cancel(tickets[i])) continue;
        const MailboxResult result = caller.wait(tickets[i], kForever, reply);
        expect(result == MailboxResult::kOk || result == MailboxResult::kFailed, "each request ends");
        if (result == MailboxResult::kOk) {
          ++delivered;
          expect(number_of(reply.view().first(8)) == numbers[i] * 3, "the reply is the request's");
        }
        expect(caller.wait(tickets[i], kForever, reply) == MailboxResult::kGone, "a reply is delivered once");
      }
    }
    mailbox.bury_caller(member);
  }

  const Expect& expect;
  Room room;
  Mailbox mailbox;
  std::atomic<bool> is_over{false};
  std::atomic<std::uint64_t> alive[kGeometry.workers] = {};  // epoch << 1 | 1
  std::atomic<int> replies{0}, delivered{0};
};

void check_crowd(const Expect& expect, int rounds) {
  Crowd crowd(expect);
  std::vector<std::thread> workers;
  for (int i = 0; i < 3; ++i) workers.emplace_back([&crowd, i] { crowd.serve(i); });
  std::thread digger([&crowd] { crowd.bury(); });
  std::thread other([&crowd, rounds] { crowd.call(1'000'000'000, rounds); });
  crowd.call(1, rounds);
  other.join();
  crowd.is_over = true;
  digger.join();
  // Those that sleep for ever are buried where they sleep.
  for (std::uint32_t id = 0; id < kGeometry.workers; ++id)
    if ((crowd.alive[id] & 1) != 0) crowd.mailbox.bury_worker({id, static_cast<std::uint32_t>(crowd.alive[id] >> 1)});
  for (std::thread& worker : workers) worker.join();
  for (std::uint32_t id = 0; id < kGeometry.workers; ++id)
    if ((crowd.alive[id] & 1) != 0) crowd.mailbox.bury_worker({id, static_cast<std::uint32_t>(crowd.alive[id] >> 1)});
  expect(crowd.delivered > 0 && crowd.replies >= crowd.delivered, "replies were delivered");
  expect(crowd.mailbox.fault().empty(), "the mailbox is whole");
  expect(crowd.mailbox.census().free == kGeometry.entries, "every entry comes back in the end");
}

void check_probe(const Expect& expect) {
  const std::size_t size = 64 * 3 + 8;
  const Room room(4096);
  const auto* end = static_cast<const char*>(room.memory) + 4096;
  const std::vector<double> means = h3::probe_access(end - size, size, 5, 1);
  expect(means.size() == 5, "one mean for each batch");
  for (const double mean : means) expect(mean > 0 && mean < 1e6, "an access takes time");
}

}  // namespace

void check_mailbox(const Expect& expect) {
  check_header(expect);
  check_crowd(expect, 2000);
  check_probe(expect);
}
