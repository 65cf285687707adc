// The I/O engine on a file of its own, on every backend, and on a kernel that misbehaves by script.
#include "io.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "h3/crc32c.hpp"
#include "h3/io_engine.hpp"

namespace {

using h3::io::Engine;
using h3::io::Fault;
using h3::io::Kind;
using h3::io::Op;
using h3::io::Options;
using h3::io::Result;
using h3::io::Status;

constexpr std::uint64_t kPage = 4096, kPages = 64, kSize = kPage * kPages;

struct TemporaryFile {
  TemporaryFile() : file(std::tmpfile()), bytes(kSize) {
    std::mt19937 generator(5);
    for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(generator());
    if (file == nullptr || ::pwrite(descriptor(), bytes.data(), kSize, 0) != static_cast<ssize_t>(kSize)) std::abort();
  }
  ~TemporaryFile() { std::fclose(file); }
  int descriptor() const { return ::fileno(file); }

  std::FILE* file;
  std::vector<unsigned char> bytes;
};

Options options_of(const TemporaryFile& file, const char* backend, std::vector<Fault> faults = {}) {
  Options options;
  options.files = {file.descriptor()};
  options.depth = 4;
  options.backend = backend;
  options.faults = std::move(faults);
  return options;
}

Op op_of(Kind kind, std::uint64_t page, std::uint64_t pages, unsigned char* memory, std::uint32_t* crcs) {
  return {page, page * kPage, reinterpret_cast<std::uint64_t>(memory) + page * kPage, pages * kPage,
          reinterpret_cast<std::uint64_t>(crcs == nullptr ? nullptr : crcs + page), kPage, kind, 0, 20'000};
}

std::vector<Result> run(Engine& engine, const std::vector<Op>& ops, const Expect& expect) {
  expect(engine.submit(ops.data(), ops.size()), "an open engine takes ops");
  engine.wait(60'000'000'000, ops.size());
  std::vector<Result> results(ops.size());
  expect(engine.poll(results.data(), results.size()) == ops.size(), "every op has its result");
  return results;
}

bool all(const std::vector<Result>& results, Status status) {
  for (const Result& result : results)
    if (result.status != status) return false;
  return true;
}

// Writes that fill in checksums and reads that compare them, in memory of exactly the size.
void check_round_trip(const char* backend, const Expect& expect, const std::vector<Fault>& faults = {}) {
  const TemporaryFile file;
  std::vector<unsigned char> source(file.bytes.rbegin(), file.bytes.rend()), target(kSize);
  std::vector<std::uint32_t> crcs(kPages);
  Options options = options_of(file, backend, faults);
  options.buffers = {{reinterpret_cast<std::uint64_t>(target.data()), kSize}};
  Engine engine(std::move(options));
  std::vector<Op> writes, reads;
  for (std::uint64_t page = 0; page < kPages; page += 2) {
    writes.push_back(op_of(Kind::kWrite, page, 2, source.data(), crcs.data()));
    reads.push_back(op_of(Kind::kRead, page, 2, target.data(), crcs.data()));
  }
  expect(all(run(engine, writes, expect), Status::kOk), "writes");
  expect(all(run(engine, {op_of(Kind::kFlush, 0, 0, nullptr, nullptr)}, expect), Status::kOk), "flush");
  expect(all(run(engine, reads, expect), Status::kOk), "reads");
  expect(source == target, "what was written is read");
  crcs[5] ^= 1;
  const Result mismatch = run(engine, {reads[2]}, expect)[0];
  expect(mismatch.status == Status::kChecksum && mismatch.page == 1, "a wrong checksum is named");
  Op behind = op_of(Kind::kRead, 0, 1, target.data(), nullptr);
  behind.offset = kSize;
  expect(all(run(engine, {behind}, expect), Status::kEndOfFile), "end of file");
  engine.close();
  expect(!engine.submit(writes.data(), 1), "a closed engine takes nothing");
}

// Several threads hand in ops and fetch results of one engine, and it is closed in the middle.
void check_threads(const char* backend, const Expect& expect) {
  const TemporaryFile file;
  std::vector<unsigned char> target(kSize);
  Engine engine(options_of(file, backend));
  std::atomic<std::size_t> taken{0}, ended{0};
  const auto submit_and_poll = [&] {
    for (std::uint64_t i = 0; i < 400; ++i) {
      const Op op = op_of(Kind::kRead, i % kPages, 1, target.data(), nullptr);
      taken += engine.submit(&op, 1) ? 1 : 0;
      if (i % 50 == 0) engine.cancel_all();
      Result results[8];
      ended += engine.poll(results, 8);
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(submit_and_poll);
  engine.wait(1'000'000, 100);
  engine.close();
  for (std::thread& thread : threads) thread.join();
  Result results[64];
  while (const std::size_t count = engine.poll(results, 64)) ended += count;
  expect(taken == ended, "each op that was taken ended once");
}

void check_script(const Expect& expect) {
  const TemporaryFile file;
  std::vector<unsigned char> target(kSize);
  const std::vector<Op> ops{op_of(Kind::kRead, 0, 8, target.data(), nullptr),
                            op_of(Kind::kRead, 8, 8, target.data(), nullptr)};
  const auto statuses = [&](std::vector<Fault> faults, Status first, Status second, const char* what) {
    Engine engine(options_of(file, "script", std::move(faults)));
    std::vector<Op> both = ops;
    for (Op& op : both) op.deadline_ms = 50;
    std::vector<Result> results = run(engine, both, expect);
    if (results[0].tag != 0) std::swap(results[0], results[1]);
    expect(results[0].status == first && results[1].status == second, what);
    expect(engine.statistics().in_flight == 0, what);
  };
  constexpr std::uint64_t kAlways = ~std::uint64_t{0};
  statuses({{Fault::kShort, 0, 1, 5000}}, Status::kOk, Status::kOk, "short");
  statuses({{Fault::kShort, 0, 1, 0}}, Status::kEndOfFile, Status::kOk, "end of file once");
  statuses({{Fault::kError, 1, 1, EIO}}, Status::kOk, Status::kError, "error");
  statuses({{Fault::kError, 0, 2, EAGAIN}}, Status::kOk, Status::kOk, "retried");
  statuses({{Fault::kError, 0, kAlways, EINTR}}, Status::kDeadline, Status::kDeadline, "retried until the deadline");
  statuses({{Fault::kHold, 0, 1, 0}}, Status::kDeadline, Status::kOk, "held until the deadline");
  statuses({{Fault::kLate, 0, 1, 0}}, Status::kOk, Status::kOk, "late");
  statuses({{Fault::kFull, 0, kAlways, 2}}, Status::kOk, Status::kOk, "full queue");
  statuses({{Fault::kRepeat, 0, kAlways, 0}, {Fault::kStale, 0, kAlways, 0}}, Status::kOk, Status::kOk, "repeated, stale");
}

void check_crc32c(const Expect& expect) {
  expect(h3::crc32c("123456789", 9) == 0xe3069283, "crc32c check value");
  for (std::size_t size = 0; size < 1500; size += size < 300 ? 1 : 67) {
    std::vector<unsigned char> bytes(size, static_cast<unsigned char>(size));
    const std::uint32_t expected = h3::crc32c(bytes.data(), size, h3::CrcMethod::kPortable);
    for (const h3::CrcMethod method : {h3::CrcMethod::kSse42, h3::CrcMethod::kVpclmul})
      if (h3::crc32c_supported(method)) expect(h3::crc32c(bytes.data(), size, method) == expected, "crc32c methods");
  }
}

bool has_ring() {
  try {
    const TemporaryFile file;
    Engine engine(options_of(file, "io_uring"));
    return true;
  } catch (const std::runtime_error& error) {
    std::printf("io_uring is left out: %s\n", error.what());
    return false;
  }
}

}  // namespace

void check_io(const Expect& expect) {
  check_crc32c(expect);
  std::vector<const char*> backends{"threads", "script"};
  if (has_ring()) backends.push_back("io_uring");
  for (const char* backend : backends) {
    check_round_trip(backend, expect);
    check_threads(backend, expect);
  }
  check_round_trip("script", expect, {{Fault::kShort, 3, 20, kPage}, {Fault::kRepeat, 7, 9, 0}});
  check_script(expect);
}
