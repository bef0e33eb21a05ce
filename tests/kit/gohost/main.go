// A go-plugin host on the released library: launches one plugin as Nomad does and makes the calls that it reads from
// stdin, one JSON object a line; messages are raw protobuf bytes, so that no generated code is needed here.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

type request struct {
	Method    string   `json:"method"`
	Requests  [][]byte `json:"requests"`
	Responses int      `json:"responses"` // how many to read; 0: to the end of the stream
	TimeoutS  float64  `json:"timeout_s"`
}

type reply struct {
	Responses [][]byte `json:"responses"`
	Code      uint32   `json:"code"`
	Message   string   `json:"message"`
	Status    []byte   `json:"status"` // google.rpc.Status, with its details
	TookS     float64  `json:"took_s"`
}

// raw hands bytes through: both sides are protobuf already.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = append([]byte(nil), data...); return nil }
func (raw) Name() string                       { return "proto" }

type connPlugin struct{ plugin.NetRPCUnsupportedPlugin }

func (connPlugin) GRPCServer(*plugin.GRPCBroker, *grpc.Server) error {
	return errors.New("this is a host")
}

func (connPlugin) GRPCClient(_ context.Context, _ *plugin.GRPCBroker, conn *grpc.ClientConn) (any, error) {
	return conn, nil
}

func call(conn *grpc.ClientConn, r request) reply {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(r.TimeoutS*float64(time.Second)))
	defer cancel()
	desc := &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	stream, err := conn.NewStream(ctx, desc, r.Method, grpc.ForceCodec(raw{}))
	answer := reply{Responses: [][]byte{}}
	for i := 0; err == nil && i < len(r.Requests); i++ {
		err = stream.SendMsg(&r.Requests[i])
	}
	if err == nil {
		err = stream.CloseSend()
	}
	for err == nil && (r.Responses == 0 || len(answer.Responses) < r.Responses) {
		var message []byte
		if err = stream.RecvMsg(&message); err == nil {
			answer.Responses = append(answer.Responses, message)
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		said := status.Convert(err)
		answer.Code, answer.Message = uint32(said.Code()), said.Message()
		answer.Status, _ = proto.Marshal(said.Proto())
	}
	return answer
}

func serve(client *plugin.Client, protocol plugin.ClientProtocol, conn *grpc.ClientConn) error {
	lines := bufio.NewReader(os.Stdin)
	out := json.NewEncoder(os.Stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var r request
		if err := json.Unmarshal(line, &r); err != nil {
			return err
		}
		began := time.Now()
		var answer reply
		switch r.Method {
		case "ping":
			if err := protocol.Ping(); err != nil {
				answer.Code, answer.Message = 1, err.Error()
			}
		case "kill":
			client.Kill()
			if !client.Exited() {
				answer.Code, answer.Message = 1, "it did not exit"
			}
		default:
			answer = call(conn, r)
		}
		answer.TookS = time.Since(began).Seconds()
		if err := out.Encode(answer); err != nil {
			return err
		}
	}
}

func run(path string) error {
	client := plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig: plugin.HandshakeConfig{
			ProtocolVersion:  2,
			MagicCookieKey:   "NOMAD_PLUGIN_MAGIC_COOKIE",
			MagicCookieValue: "e4327c2e01eabfd75a8a67adb114fb34a757d57eee7728d857a8cec6e91a7255",
		},
		Plugins:          map[string]plugin.Plugin{"driver": connPlugin{}},
		Cmd:              exec.Command(path),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		Logger:           hclog.New(&hclog.LoggerOptions{Output: os.Stderr, Level: hclog.Debug, JSONFormat: true}),
	})
	defer client.Kill()
	protocol, err := client.Client()
	if err != nil {
		return err
	}
	conn, err := protocol.Dispense("driver")
	if err != nil {
		return err
	}
	return serve(client, protocol, conn.(*grpc.ClientConn))
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
