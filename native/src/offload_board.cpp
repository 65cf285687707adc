#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "offload_job.hpp"

namespace h3 {

using namespace offload;

namespace {

constexpr std::uint64_t kMagic = 0x4452414f42424f4a;  // "JOBBOARD"
constexpr std::size_t kJobBytesMax = std::size_t{1} << 30;

struct alignas(64) BoardHeader {
  std::atomic<std::uint64_t> magic;  // written last
  std::uint32_t version, jobs;
  std::uint64_t job_bytes;
  std::atomic<std::uint32_t> next_helper;
};
static_assert(sizeof(BoardHeader) == 64);

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

BoardHeader* header_in(void* memory, std::size_t size_bytes) {
  require(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0, "the memory must begin at a multiple of 64 bytes");
  require(size_bytes >= sizeof(BoardHeader), "the memory is too small for a board of jobs");
  return static_cast<BoardHeader*>(memory);
}

}  // namespace

MappedRanges::MappedRanges(std::vector<MappedRange> ranges) : ranges_(std::move(ranges)) {
  std::sort(ranges_.begin(), ranges_.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
}

bool MappedRanges::holds(std::uint64_t address, std::uint64_t size) const {
  const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                      [](std::uint64_t at, const MappedRange& range) { return at < range.begin; });
  if (after == ranges_.begin()) return false;
  const MappedRange& range = *std::prev(after);
  return address < range.end && size <= range.end - address;
}

std::size_t JobBoard::size_bytes(std::uint32_t jobs, std::size_t job_bytes) {
  const bool is_valid = jobs > 0 && jobs <= kJobsMax && job_bytes >= sizeof(Job) && job_bytes <= kJobBytesMax &&
                        job_bytes % 64 == 0;
  return is_valid ? sizeof(BoardHeader) + jobs * job_bytes : 0;
}

JobBoard JobBoard::open(void* memory, std::size_t size_bytes, std::uint32_t jobs, std::size_t job_bytes) {
  BoardHeader* const header = header_in(memory, size_bytes);
  const std::size_t needed = JobBoard::size_bytes(jobs, job_bytes);
  require(needed != 0, "a board has 1 to 64 jobs of a multiple of 64 bytes each");
  require(size_bytes >= needed, "the memory is too small for so many jobs");
  if (header->magic.load(std::memory_order_acquire) == 0) {
    header->version = kVersion;
    header->jobs = jobs;
    header->job_bytes = job_bytes;
    header->magic.store(kMagic, std::memory_order_release);
  }
  const JobBoard board = attach(memory, size_bytes);
  require(board.jobs_ == jobs && board.job_bytes_ == job_bytes, "a board of other numbers lies there");
  return board;
}

JobBoard JobBoard::attach(void* memory, std::size_t size_bytes) {
  const BoardHeader* const header = header_in(memory, size_bytes);
  require(header->magic.load(std::memory_order_acquire) == kMagic, "no board of jobs lies there");
  require(header->version == kVersion, "the board of jobs is of another version");
  const JobBoard board(static_cast<char*>(memory), header->jobs, header->job_bytes);
  const std::size_t needed = JobBoard::size_bytes(board.jobs_, board.job_bytes_);
  require(needed != 0 && needed <= size_bytes, "the header of the board of jobs is damaged");
  return board;
}

Job& JobBoard::job(std::uint32_t place) const {
  return *reinterpret_cast<Job*>(memory_ + sizeof(BoardHeader) + place * job_bytes_);
}

std::uint32_t JobBoard::next_helper() const {
  auto& next = reinterpret_cast<BoardHeader*>(memory_)->next_helper;
  return next.fetch_add(1) % (kHelpersMax - 1) + 1;
}

}  // namespace h3
