--[[
  Adds statistics to the keys of one policy, keeps each within its maximum size, and sets its expiry.
  Version  5

  KEYS   the keys, all in one slot
  ARGV   now (not used; it is the first argument of every script), then per key: type, TTL in s, maximum size (0: none),
         number of values, and the values, by type
           counts   field and increment of a HASH
           ranks    member and increment of a ZSET; the highest are kept
           levels   member and score of a ZSET; the highest are kept
           fields   field and value of a HASH; no new one beyond the maximum
           lines    items of a LIST, pushed to the front; the newest are kept
]]
local call, at = redis.call, 2
for _, key in ipairs(KEYS) do
  local type, ttl, most, last = ARGV[at], ARGV[at + 1], ARGV[at + 2] + 0, at + 3 + ARGV[at + 3]
  if type == "lines" then
    for i = at + 4, last do
      call("LPUSH", key, ARGV[i])
    end
    call("LTRIM", key, 0, most - 1)
  else
    local command = type == "counts" and "HINCRBY" or type == "ranks" and "ZINCRBY" or "ZADD"
    for i = at + 4, last, 2 do
      if type == "counts" then
        call(command, key, ARGV[i], ARGV[i + 1])
      elseif type == "fields" then
        if call("HLEN", key) < most or call("HEXISTS", key, ARGV[i]) == 1 then
          call("HSET", key, ARGV[i], ARGV[i + 1])
        end
      else
        call(command, key, ARGV[i + 1], ARGV[i])
      end
    end
    if most > 0 and type ~= "fields" then
      call("ZREMRANGEBYRANK", key, 0, -most - 1)
    end
  end
  call("EXPIRE", key, ttl)
  at = last + 1
end
return 1
