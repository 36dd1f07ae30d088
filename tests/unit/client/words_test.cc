#include "client/cli/words.h"

#include <gtest/gtest.h>

#include "h3/v1/types.pb.h"

namespace h3::ctl {
namespace {

TEST(WordTest, LosesThePrefixOfItsType) {
  EXPECT_EQ(Word(v1::PARTITION_REF2VA), "ref2va");
  EXPECT_EQ(Word(v1::DTYPE_BF16), "bf16");
  EXPECT_EQ(Word(v1::QKV_LAYOUT_INTERLEAVED), "interleaved");
  EXPECT_EQ(Word(v1::FC1_ORDER_GATE_FIRST), "gate_first");
  EXPECT_EQ(Word(v1::FC1_ORDER_UNSPECIFIED), "unknown");
}

TEST(ShellWordTest, QuotesWhatAShellWouldTakeApart) {
  EXPECT_EQ(ShellWord("sub/style.v2=0.8,audio=0"), "sub/style.v2=0.8,audio=0");
  EXPECT_EQ(ShellWord("my style=1"), "'my style=1'");
  EXPECT_EQ(ShellWord("it's $HOME=1"), "'it'\\''s $HOME=1'");
  EXPECT_EQ(ShellWord(""), "''");
}

TEST(BarTest, IsAsLongHoweverMuchIsDone) {
  EXPECT_EQ(Bar(0, 8), "[>                             ]");
  EXPECT_EQ(Bar(8, 8), "[==============================]");
  EXPECT_EQ(Bar(9, 8), Bar(8, 8));
  EXPECT_EQ(Bar(0, 0), Bar(8, 8));
  EXPECT_EQ(Bar(uint64_t{1} << 39, uint64_t{1} << 40), "[===============>              ]");
}

}  // namespace
}  // namespace h3::ctl
